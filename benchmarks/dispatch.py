"""What a call to a pool of workers costs: rlflow beside verl's RayWorkerGroup with DP_COMPUTE_PROTO, and a chain of stages beside plain
Ray calls. Interleaved, medians.

    python benchmarks/dispatch.py [--rounds 8] [--block 5] [--json] [--venv FOLDER] [--index URL] [--systems …]

The payload is 256 rows of 2,048 tokens in nine columns, one int64 and eight float32 (21 MB); the method reads all nine and gives one
float32 column. verl's driver holds the DataProto and gets the result. In rlflow columns lie on workers, so there are four cases:

    stays     the call in the middle of a graph: inputs on the ranks in the split of the call, the result stays there
    moves     the same from a pool of 2 to one of 4: every rank gets rows that lie on another
    touched   columns of the driver that no worker has seen: they are spread, and the result stays
    returned  the same by Pool.call_batch, whose result comes back to the driver: what verl does

The chain: 12 stages that do nothing on a pool of 8, from the start of the first to the end of the last as the executor runs them,
beside 12 times a call of each of 8 actors and ray.get.

verl is installed without its requirements into an environment of its own, with this one's torch, Ray and numpy and with what its
controller imports, because they would bring the CUDA build of torch and much that a controller needs not. It has its own local Ray.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VERL = "verl==0.9.1"
IMPORTED = ("tensordict==0.10.0", "omegaconf==2.4.0", "codetiming==1.4.0", "transformers==5.10.4")  # by verl's controller
ROWS, TOKENS, STAGES, RANKS = 256, 2048, 12, 8
NAMES = ("sampled_logprobs", "logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns", "weights")
LIMIT = 300.0  # seconds that a process may take to answer

DISPATCH = f'''
from rlflow import flow, loss, stage, token

OTHERS = {NAMES[1:]!r}

@stage(gives={{name: token for name in OTHERS}})
def make(sampled_logprobs):
    return tuple(sampled_logprobs for _ in OTHERS)

@stage(gives="values")
def step(tokens, {", ".join(NAMES)}):
    return values

@loss
def nothing(new):
    return new.logprobs, {{}}

@flow
def dispatch(prompts, actor):
    batch = actor.generate(prompts, samples=1, max_tokens=4)
    batch |= make(batch)
    batch |= step(batch)
    actor.update(batch, nothing)
'''

CHAIN = f'''
from rlflow import flow, loss, stage

@stage(gives="scores")
def step(scores):
    return scores

@loss
def nothing(new, scores):  # so that the update waits for the chain
    return new.logprobs, {{}}

@flow
def chain(prompts, actor, reward):
    batch = actor.generate(prompts, samples=1, max_tokens=4)
    batch |= reward(batch)
    for _ in range({STAGES}):
        batch |= step(batch)
    actor.update(batch, nothing)
'''

Cases = dict[str, Callable[[], float]]  # name → one repetition, which gives its seconds


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


# -- rlflow ----------------------------------------------------------------------------------------------------------------------


class Echo:
    """What Pool.call_batch calls."""

    def step(self, batch: Any) -> Any:
        for name in batch.columns:
            batch[name]
        return batch.select("values")


def payload() -> Any:
    import torch

    from rlflow.axis import Axis
    from rlflow.batch import Batch, Data
    from rlflow.columns import Kind, Level

    lengths = torch.full((ROWS,), TOKENS)
    columns = {"tokens": Data(Kind(Level.TOKEN, "int64"), torch.ones(ROWS * TOKENS, dtype=torch.int64), lengths)}
    columns |= {name: Data(Kind(Level.TOKEN, "float32"), torch.rand(ROWS * TOKENS), lengths) for name in NAMES}
    return Batch(Axis.fresh(ROWS), columns)


@contextlib.contextmanager
def rlflow_cases(folder: Path) -> Iterator[Cases]:
    import rlflow
    from rlflow.cluster.rpc.pool import make_pool
    from rlflow.execution.engine import CallOptions

    (folder / "dispatch.py").write_text(DISPATCH)
    roles = rlflow.roles(str(folder / "dispatch.py"), backend="null", pools="two=2,four=4", prompts=8, threads=1, actor={"pool": "four"})
    engine, step, batch = roles.prepared.engine, roles.prepared.plan.program.functions["step"], payload()
    held = {pool: engine.spread(batch, pool) for pool in ("two", "four")}
    echoes = {ranks: make_pool(f"echo{ranks}", Echo, ranks, lambda rank: (), None, num_cpus=0) for ranks in (2, 4)}
    for pool in echoes.values():
        pool.made(LIMIT).result()

    def stage(given: Any, pool: str) -> Callable[[], float]:
        return lambda: timed(lambda: engine.stage(step, given, {}, 0, CallOptions(pool)))

    def returned(ranks: int) -> Callable[[], float]:
        return lambda: timed(lambda: echoes[ranks].call_batch(Echo.step, batch).result())

    try:
        yield {"stays, 2 workers": stage(held["two"], "two"), "stays, 4 workers": stage(held["four"], "four"),
               "moves, 2 to 4 workers": stage(held["two"], "four"),
               "touched, 2 workers": stage(batch, "two"), "touched, 4 workers": stage(batch, "four"),
               "returned, 2 workers": returned(2), "returned, 4 workers": returned(4)}
    finally:
        roles.close()


# -- the chain -------------------------------------------------------------------------------------------------------------------


class Plain:
    def step(self) -> int:
        return 0


@contextlib.contextmanager
def chain_cases(folder: Path) -> Iterator[Cases]:
    import ray

    import rlflow

    (folder / "chain.py").write_text(CHAIN)
    run = rlflow.roles(str(folder / "chain.py"), backend="null", pools=f"all={RANKS}", prompts=64, threads=1).prepared
    actors = [ray.remote(num_cpus=0)(Plain).remote() for _ in range(RANKS)]

    def executor() -> float:
        spans = [span for span in run.executor.run(run.plan, run.prompts.take(64)).spans if span.node.startswith("step")]
        assert len(spans) == STAGES, f"{len(spans)} stages ran"
        return max(span.end for span in spans) - min(span.start for span in spans)

    def plain() -> None:
        for _ in range(STAGES):
            ray.get([actor.step.remote() for actor in actors])

    try:
        yield {"chain, rlflow": executor, "chain, plain Ray": lambda: timed(plain)}
    finally:
        run.close()


# -- verl ------------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def verl_cases(folder: Path) -> Iterator[Cases]:
    import ray
    import torch
    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    class Stage(Worker):
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def step(self, data: Any) -> Any:
            return DataProto.from_single_dict({"values": data.batch["values"]})

    ray.init("local", num_cpus=16, include_dashboard=False, _node_ip_address="127.0.0.1", object_store_memory=512 << 20,
             log_to_driver=False)
    columns = {"tokens": torch.ones(ROWS, TOKENS, dtype=torch.int64)} | {name: torch.rand(ROWS, TOKENS) for name in NAMES}
    data = DataProto.from_single_dict(columns)

    def group(ranks: int) -> Callable[[], float]:
        pool = RayResourcePool([ranks], use_gpu=False, max_colocate_count=1)
        workers = RayWorkerGroup(pool, RayClassWithInitArgs(ray.remote(Stage)), use_gpu=False, device_name="cpu")
        assert torch.equal(workers.step(data).batch["values"], columns["values"])
        return lambda: timed(lambda: workers.step(data))

    try:
        yield {f"verl, {ranks} workers": group(ranks) for ranks in (2, 4)}
    finally:
        ray.shutdown()


def verl_python(folder: Path, index: str | None) -> str:
    """The interpreter of verl's environment, which is made where it is not there yet."""
    wanted = [*(f"{name}=={version(name)}" for name in ("torch", "ray", "numpy")), *IMPORTED]
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.is_file() or mark.read_text().split() != [VERL, *wanted]:
        print(f"installing {VERL} in {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *(["--extra-index-url", index] if index else [])]
        for words in (wanted, ["--no-deps", VERL]):
            if subprocess.run([*install, *words], stdout=sys.stderr).returncode:
                sys.exit("verl's environment could not be made; where torch is a build that PyPI has not, name its --index")
        mark.write_text("\n".join([VERL, *wanted]))
    return str(python)


# -- turns -----------------------------------------------------------------------------------------------------------------------

CASES: dict[str, Any] = {"rlflow": rlflow_cases, "verl": verl_cases, "chain": chain_cases}


def answer(system: str) -> None:
    """In a process of its own: at each line, which says how often, every case in turn, and their seconds."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, CASES[system](Path(folder)) as cases:
        for line in itertools.chain(["3"], iter(sys.stdin.readline, "")):  # the first three warm up
            found: dict[str, list[float]] = {name: [] for name in cases}
            for _ in range(int(line)):
                for name, case in cases.items():
                    found[name].append(case())
            print(json.dumps(found), file=out, flush=True)


class Process:
    """The process of one system, which does its cases at a word."""

    def __init__(self, system: str, python: str, folder: Path) -> None:
        self.system, self.log = system, folder / f"{system}.log"
        path = "" if system == "verl" else os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen([python, str(Path(__file__).resolve()), "--worker", system], env=os.environ | variables,
                                            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)

    def ask(self, times: int) -> dict[str, list[float]]:
        print(times, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, list[float]]:
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT)
        line = self.process.stdout.readline() if ready else ""  # type: ignore[union-attr]
        if not line:
            tail = "\n".join(self.log.read_text().splitlines()[-15:])
            sys.exit(f"{self.system} gave no result ({'it ended' if ready else f'none in {LIMIT:g} s'}); its last lines:\n{tail}")
        found: dict[str, list[float]] = json.loads(line)
        return found

    def close(self) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()
        self.process.wait()


def measured(systems: list[str], given: argparse.Namespace) -> dict[str, list[float]]:
    """Case → seconds. The systems have their blocks in turn, each first as often as the others."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as started:
        processes = []
        for system in systems:
            python = verl_python(given.venv, given.index) if system == "verl" else sys.executable
            processes.append(Process(system, python, Path(folder)))
            started.callback(processes[-1].close)
            processes[-1].answer()  # the warm-up, before the next one starts
        for number in range(given.rounds if processes else 0):
            turn = number % len(processes)
            for process in processes[turn:] + processes[:turn]:
                for name, seconds in process.ask(given.block).items():
                    found.setdefault(name, []).extend(seconds)
    return found


def rows_of(found: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row per case; ``ratio`` is its median over that of what stands beside it: verl on as many workers, or plain Ray."""
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    rows = []
    for name, seconds in found.items():
        other = "chain, plain Ray" if name.startswith("chain") else f"verl, {name.split()[-2]} workers"
        ratio = medians[name] / medians[other] if other in medians and other != name else None
        rows.append({"case": name, "median": medians[name], "fastest": min(seconds), "slowest": max(seconds), "times": len(seconds),
                     "beside": other, "ratio": ratio})
    return rows


def facts() -> dict[str, Any]:
    """The machine, and how busy it is."""
    return {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version(), "load": os.getloadavg()[0],
            "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30, "torch": version("torch"), "ray": version("ray")}


def show(rows: list[dict[str, Any]], machine: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = "{cores} cores ({machine}), {memory} GiB, load {load:.1f} before, Python {python}, torch {torch}, Ray {ray}"
    what = f"ms a call, {ROWS} rows × {TOKENS} tokens × 9 columns; {STAGES} stages × {RANKS} workers"
    table = Table(title=f"{what}\n{title.format(**machine)}")
    for head in ("case", "median", "fastest", "slowest", "times", "ratio"):
        table.add_column(head, justify="left" if head == "case" else "right")
    for row in rows:
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f} × {row['beside']}"
        table.add_row(row["case"], *(f"{row[name] * 1e3:.1f}" for name in ("median", "fastest", "slowest")), str(row["times"]), ratio)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block", type=int, default=5, help="repetitions of a system's cases before the next one has its turn")
    parser.add_argument("--venv", type=Path, default=Path.home() / ".cache" / "rlflow" / "peers" / "verl", help="verl's environment")
    parser.add_argument("--index", help="a package index that has this torch, where PyPI has not")
    parser.add_argument("--systems", nargs="+", choices=CASES, default=["verl", "rlflow", "chain"])
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of the table")
    parser.add_argument("--worker", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        return answer(given.worker)
    machine = facts()
    together, chain = [name for name in given.systems if name != "chain"], [name for name in given.systems if name == "chain"]
    found = measured(together, given) | measured(chain, given)  # the chain by itself: it has the most workers
    rows = rows_of(found)
    print(json.dumps({**machine, "verl": VERL, "rows": rows})) if given.json else show(rows, machine)


if __name__ == "__main__":
    main()
