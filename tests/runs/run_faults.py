"""Interrupted runs, in processes that can die. Shared by the tests of resume and the benchmark of faults.

Children are forked, because importing torch takes seconds. A fault is a function called as a node begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import rlflow
import rlflow.data.tasks
from rlflow.author.load import load_flow
from rlflow.checkpoints.reading import load_latest
from rlflow.cli.main import main
from rlflow.execution import executor
from rlflow.monitoring.outputs import make_reporter
from rlflow.runs import resume
from rlflow.runs.session import Interrupted

FLOW_FILES = Path(__file__).parent / "flows"
ADAPTIVE, BAD = str(FLOW_FILES / "adaptive.py"), str(FLOW_FILES / "bad.py")
FLOWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ppo": ({"max_tokens": 4, "minibatch": 4}, {"prompts": 8}),
    "ppo_adaptive": ({"max_tokens": 4, "minibatch": 4, "horizon": 16, "target_kl": 0.05}, {"prompts": 8}),
    "grpo": ({"max_tokens": 4, "minibatch": 16, "samples": 4, "beta": 0.1}, {"prompts": 8}),
    ADAPTIVE: ({}, {"prompts": 4}),
    BAD: ({}, {"prompts": 8}),
}
MODEL = f"{next(iter(rlflow.data.tasks.__path__))}/arithmetic_model"
TIMES = ("seconds", "response/tokens_per_second")
MARK = "RLFLOW_TEST_MARK"  # an environment variable that all started processes inherit


def write_sums(path: Path, count: int = 24) -> Path:
    """Write questions with answers; 24 make three iterations of 8 prompts."""
    rows = [{"prompt": f"{a} + {b} =", "answer": str(a + b)} for a in range(10, 30) for b in range(10, 20)][
        :count
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def small(folder: Path, count: int = 200) -> dict[str, Any]:
    """Return the keywords of a small run on this many sums; the folder holds the data file and the run."""
    data = str(write_sums(folder / "sums.jsonl", count))
    return {
        "model": MODEL,
        "data": data,
        "prompts": 8,
        "iterations": 2,
        "held_out": 16,
        "out": str(folder / "runs"),
        "lr": 1e-3,
    }


def run(name: str, keywords: Mapping[str, Any], run_name: str, **changes: Any) -> Any:
    hp, more = FLOWS[name]
    flow = load_flow(name)
    return rlflow.run(
        flow, dataclasses.replace(flow.parameters.hp, **hp), **{**keywords, **more, **changes}, name=run_name
    )


def resumed(folder: Path, **changes: Any) -> int:
    return in_child(lambda: resume.resume(folder, changes, make_reporter(quiet=True)))


# -- processes
# ------------------------------------------------------------------------------------------------------------


def forked(action: Callable[[], object]) -> int:
    """Return the process id of a child that runs this action. The child ends with 0, with 130 after an
    interrupt, or with 1."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        except Interrupted:
            code = 130
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(bool(stop.code))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return pid


def status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(action: Callable[[], object]) -> int:
    """Run an action in a process of its own and return its exit status; negative: the signal that ended
    it."""
    return status(forked(action))


def must(code: int, expected: int) -> None:
    if code != expected:
        raise RuntimeError(f"found exit code {code} of a run without faults, expected {expected}")


@dataclass(frozen=True)
class Said:
    """The exit status and the output of a command."""

    code: int
    out: str
    err: str


def started(words: Sequence[object], out: Path, before: Callable[[], object] = lambda: None) -> int:
    """Return the process id of a child running `rlflow WORDS`; its output goes to out.stdout and
    out.stderr."""

    def action() -> None:
        for number, suffix in ((1, ".stdout"), (2, ".stderr")):
            os.dup2(os.open(f"{out}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
        sys.argv = ["rlflow", *map(str, words)]
        before()
        main()

    return forked(action)


def said(pid: int, out: Path) -> Said:
    return Said(status(pid), Path(f"{out}.stdout").read_text(), Path(f"{out}.stderr").read_text())


def command(words: Sequence[object], out: Path, before: Callable[[], object] = lambda: None) -> Said:
    """Run `rlflow WORDS` in a child."""
    return said(started(words, out, before), out)


def quietly(action: Callable[[], object], out: Path) -> Said:
    """Run an action in a child and return its output."""

    def redirected() -> None:
        for number, suffix in ((1, ".stdout"), (2, ".stderr")):
            os.dup2(os.open(f"{out}{suffix}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w") for number in (1, 2))
        action()

    return said(forked(redirected), out)


def first_to_end(pids: Sequence[int], seconds: float = 60.0) -> int | None:
    """Return the first of these children to end, without reaping it."""
    handles = {os.pidfd_open(pid): pid for pid in pids}
    try:
        ended = select.select(list(handles), [], [], seconds)[0]
        return handles[ended[0]] if ended else None
    finally:
        for handle in handles:
            os.close(handle)


def marked(mark: str, name: str = MARK) -> list[int]:
    """Return the running processes that were started with this mark in their environment, except this
    process."""
    wanted, found = f"{name}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def left_over(mark: str, name: str = MARK, seconds: float = 5.0) -> list[int]:
    """Return the processes that remain after the kernel had time to end killed ones."""
    until = time.monotonic() + seconds
    for pid in marked(mark, name):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            select.select([handle], [], [], max(until - time.monotonic(), 0))
            os.close(handle)
    return marked(mark, name)


# -- faults
# ------------------------------------------------------------------------------------------------------------


def at(node: str, iteration: int, action: Callable[[], object]) -> None:
    """Call an action in this process as a node of one iteration begins."""

    def begins(name: str, of: int) -> None:
        if (name, of) == (node, iteration):
            action()

    at_each(begins)


def at_each(action: Callable[[str, int], object]) -> None:
    """Call an action in this process as each node begins, with the node's name and the iteration."""
    perform = executor.PlanRun._perform

    def performing(self: Any, unit: int) -> None:
        action(self.plan.node(unit).name, self.engine.iteration)
        perform(self, unit)

    executor.PlanRun._perform = performing  # type: ignore[method-assign]


def signal_at(node: str, iteration: int, number: int) -> None:
    """Have this process send itself a signal as a node begins."""
    at(node, iteration, lambda: os.kill(os.getpid(), number))


def signal_before(owner: Any, name: str, number: int, call: int = 1) -> None:
    """Have this process send itself a signal when a function is called."""
    real, calls = getattr(owner, name), []

    def calling(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return real(*args, **kwargs)

    setattr(owner, name, calling)


def nodes(name: str) -> list[str]:
    """Return the nodes of one iteration that run something."""
    from rlflow.compiler.graph.model import Op, all_nodes
    from rlflow.compiler.trace.compile import compile_flow

    flow = load_flow(name)
    graph = compile_flow(flow, dataclasses.replace(flow.parameters.hp, **FLOWS[name][0])).graph
    return [node.name for node in all_nodes(graph.nodes) if node.op not in (Op.DATA, Op.STATE)]


# -- two launches
# ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Race:
    """Two launches into one folder: the outcome of the first to end, of the other, and the process of
    each."""

    first: Said
    second: Said
    pids: tuple[int, int]


def race(folder: Path, iterations: int, scratch: Path) -> Race:
    """Resume a run twice at once. Both start together; the launch that gets the lock waits until the other
    has ended."""
    begin, go = os.pipe()
    hold, release = os.pipe()

    def before() -> None:
        os.close(go)
        os.close(release)
        at("actor.generate", iterations - 1, lambda: os.read(hold, 1))
        os.read(begin, 1)  # until the other end is closed

    words = ["resume", folder, "--iterations", iterations, "--quiet"]
    outs = [scratch / f"launch-{number}" for number in range(2)]
    pids = [started(words, out, before) for out in outs]
    os.close(go)
    first = first_to_end(pids) or pids[0]
    os.close(release)
    ended = {pid: said(pid, out) for pid, out in zip(pids, outs, strict=True)}
    for end in (begin, hold):
        os.close(end)
    (other,) = set(pids) - {first}
    return Race(ended[first], ended[other], (first, other))


def killed_holder(folder: Path, iterations: int, scratch: Path) -> Said:
    """Resume a run and kill it while it works and holds the lock."""
    words = ["resume", folder, "--iterations", iterations, "--quiet"]
    return command(
        words, scratch / "killed", lambda: signal_at("actor.generate", iterations - 1, signal.SIGKILL)
    )


# -- what must be equal
# --------------------------------------------------------------------------------------------------------


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics without times; empty if every iteration was skipped and no file exists."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


@dataclass(frozen=True)
class Content:
    """Everything that must be equal: the content of the last checkpoint, and metrics without times."""

    iteration: int
    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    state: Mapping[str, Any]
    metrics: list[dict[str, Any]]
    files: Mapping[str, bytes]


def content(folder: Path) -> Content:
    saved = load_latest(folder).snapshot
    return Content(saved.iteration, saved.tensors, saved.state, metrics(folder), saved.files)


def differences(one: Content, two: Content) -> Iterator[str]:
    """Return the parts that are not equal bit for bit."""
    if one.iteration != two.iteration:
        yield f"iteration {one.iteration}, {two.iteration}"
    if one.files != two.files:
        yield f"files {[*one.files]}, {[*two.files]}"
    if one.state != two.state:
        yield f"state {one.state}, {two.state}"
    yield from (f"metrics {a}, {b}" for a, b in zip(one.metrics, two.metrics, strict=False) if a != b)
    if len(one.metrics) != len(two.metrics):
        yield f"{len(one.metrics)} and {len(two.metrics)} lines of metrics"
    yield from unequal(one.tensors, two.tensors)


def unequal(
    one: Mapping[str, Mapping[str, torch.Tensor]], two: Mapping[str, Mapping[str, torch.Tensor]]
) -> Iterator[str]:
    """Return the names of tensors that are not equal bit for bit."""
    if {group: list(members) for group, members in one.items()} != {
        group: list(members) for group, members in two.items()
    }:
        yield "names of tensors"
        return
    for group, members in one.items():
        yield from (
            f"{group}/{name}" for name, tensor in members.items() if not torch.equal(tensor, two[group][name])
        )
