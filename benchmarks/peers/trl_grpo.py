"""An iteration of GRPO in one process: rlflow, TRL's GRPOTrainer, and the floor of bare Hugging Face calls, side by side.

    python benchmarks/peers/trl_grpo.py [--rounds 9] [--block 4] [--budget 120] [--json] [--venv FOLDER] [--index URL]

All three train the same model (Qwen3-shaped, 0.8M random parameters, made here) on the same prompts: 8 prompts × 8 samples of exactly
64 tokens (the tokenizer's end token has no logit in the model, so that no row ends early), one AdamW step per iteration, float32, the
same number of threads. Each runs in a process of its own that waits its turn: rounds of ``--block`` iterations each, in an order that
rotates. Seconds are wall time from one end of an iteration to the next, with all that the system does in between; the processor time
is that of the process (rlflow's rewards, which are cheap here, are in another one). The floor is ``generate``, one forward, one
backward and one step, with nothing around it.

TRL gets a virtual environment of its own with the torch and transformers of this interpreter, made at the first call. Where this
torch is not on PyPI (2.13.0+cpu), ``--index https://download.pytorch.org/whl/cpu`` tells pip where it is.

rlflow runs `algorithms/grpo.py` as `rlflow run` would, recording included; TRL as its documentation shows, with the defaults of
GRPOConfig but for TRL_SETTINGS, where the reason stands beside each.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import random
import select
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRL = "trl==1.16.0"
SYSTEMS = ("floor", "trl", "rlflow")
PROMPTS, SAMPLES, TOKENS, LR = 8, 8, 64, 1e-5
WARM = 3  # iterations before the first round
LIMIT = 300.0  # seconds that a process may take to answer
TRL_SETTINGS = {
    "use_cpu": True,  # what is measured
    "bf16": False,  # float32, as the others
    "gradient_checkpointing": False,  # memory is no matter here, and it would cost TRL a second forward
    "per_device_train_batch_size": PROMPTS * SAMPLES,  # the batch of the others: one step per iteration
    "num_generations": SAMPLES,
    "max_completion_length": TOKENS,
    "learning_rate": LR,
    "lr_scheduler_type": "constant",  # as the others
    "save_strategy": "no",  # nobody saves
    "report_to": "none",  # nobody tracks
    "disable_tqdm": True,  # nobody draws
}


def digits(completion: str) -> float:
    """The reward: the share of digits."""
    return sum(letter in "0123456789" for letter in completion) / max(len(completion), 1)


class Turns:
    """Marks the iterations of a process, and lets blocks of them wait for the word of the parent, which is a line with their number."""

    def __init__(self) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever else is printed
        self.left, self.tokens = WARM, 0
        self.seconds: list[float] = []
        self._begin()

    def _begin(self) -> None:
        self.started, self.processor = time.perf_counter(), time.process_time()

    def tick(self, tokens: int = 0) -> None:
        """An iteration ended in which ``tokens`` were sampled."""
        now = time.perf_counter()
        self.seconds.append(now - self.started)
        self.started, self.tokens, self.left = now, self.tokens + tokens, self.left - 1
        if self.left == 0:
            self._wait()

    def _wait(self) -> None:
        block = {"seconds": self.seconds, "processor": time.process_time() - self.processor, "tokens": self.tokens}
        print(json.dumps(block), file=self.answers, flush=True)
        line = sys.stdin.readline()
        if not line:
            sys.exit()  # nothing more is wanted
        self.left, self.tokens, self.seconds = int(line), 0, []
        self._begin()


def make_files(folder: Path, prompts: int) -> None:
    """The model with its tokenizer, the data and the reward, for all three."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

    packaged = ROOT / "rlflow" / "tasks" / "arithmetic_model"
    tokenizer = AutoTokenizer.from_pretrained(packaged, local_files_only=True, trust_remote_code=False)
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, eos_token_id=None,
                         bos_token_id=None, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder / "model")
    tokenizer.add_special_tokens({"eos_token": "<never>"})  # the first id beyond the model's vocabulary
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(0)
    lines = [{"prompt": f"Add {draw.randrange(1000)}, {draw.randrange(1000)} and {draw.randrange(1000)} ="} for _ in range(prompts)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(inspect.getsource(digits))


def prompts_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]


def run_rlflow(folder: Path, iterations: int) -> None:
    from rlflow.author.load import load_flow
    from rlflow.config.flags import flat
    from rlflow.runs.api import resolve_config
    from rlflow.runs.prepare import prepare
    from rlflow.runs.session import start_run
    from rlflow.watch.reporter import Quiet

    class Marks(Quiet):
        def iteration(self, number: int, metrics: Mapping[str, float], samples: Any, stages: Any) -> None:
            turns.tick(round(metrics["response/length"] * PROMPTS * SAMPLES))

    flow = load_flow(str(ROOT / "algorithms" / "grpo.py"))
    settings = {"model": str(folder / "model"), "data": str(folder / "data.jsonl"), "reward": (f"{folder / 'reward.py'}:digits",),
                "prompts": PROMPTS, "iterations": iterations, "held_out": 0, "save_every": 0, "device": "cpu", "out": str(folder / "runs"),
                "hp.samples": SAMPLES, "hp.max_tokens": TOKENS, "hp.minibatch": PROMPTS * SAMPLES, "actor.lr": LR}
    given, hp = resolve_config(flow, None, flat(settings))
    run = prepare(flow, hp, given)
    turns = Turns()
    start_run(run, Marks())


def run_trl(folder: Path, iterations: int) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sampled = []

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        sampled.append(sum(len(ids) for ids in completion_ids))
        return [digits(completion) for completion in completions]

    class Marks(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            turns.tick(sampled.pop())

    config = GRPOConfig(output_dir=str(folder / "trl"), max_steps=iterations, **TRL_SETTINGS)
    data = Dataset.from_list(prompts_of(folder))
    trainer = GRPOTrainer(str(folder / "model"), reward, config, data, callbacks=[Marks()])
    turns = Turns()
    trainer.train()


def run_floor(folder: Path, iterations: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, local_files_only=True, trust_remote_code=False)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left", local_files_only=True, trust_remote_code=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    texts = [line["prompt"] for line in prompts_of(folder)]
    turns = Turns()
    for i in range(iterations):
        batch = [text for text in texts[i * PROMPTS % len(texts) :][:PROMPTS] for _ in range(SAMPLES)]
        inputs = tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False)
        width = inputs.input_ids.shape[1]
        ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=TOKENS)
        mask = torch.nn.functional.pad(inputs.attention_mask, (0, ids.shape[1] - width), value=1)
        logits = model(ids, attention_mask=mask, logits_to_keep=TOKENS + 1).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, width:, None])[..., 0]
        loss = -(logprobs * torch.randn(len(ids), 1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        turns.tick((ids.shape[1] - width) * len(ids))


RUNS: dict[str, Callable[[Path, int], None]] = {"floor": run_floor, "trl": run_trl, "rlflow": run_rlflow}


class Worker:
    """The process of one system, which does a block of iterations at a word."""

    def __init__(self, system: str, python: str, folder: Path, iterations: int, threads: int) -> None:
        self.system, self.log = system, folder / f"{system}.log"
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])) if system != "trl" else ""
        variables = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        variables |= {"GOMP_SPINCOUNT": "3000"} if system == "rlflow" else {}  # as `rlflow run` has it
        words = [python, str(Path(__file__).resolve()), "--worker", system, str(folder), str(iterations)]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                                            text=True)

    def block(self, iterations: int) -> dict[str, Any]:
        print(iterations, file=self.process.stdin, flush=True)
        return self.answer()

    def answer(self) -> dict[str, Any]:
        ready, _, _ = select.select([self.process.stdout], [], [], LIMIT)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            tail = "\n".join(self.log.read_text().splitlines()[-15:])
            sys.exit(f"{self.system} gave no result ({'it ended' if ready else f'none in {LIMIT:g} s'}); its last lines:\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()


def trl_python(folder: Path, index: str | None) -> str:
    """The interpreter of TRL's environment, which is made where it is not there yet."""
    wanted = [TRL, *(f"{name}=={version(name)}" for name in ("torch", "transformers"))]
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.is_file() or mark.read_text().split() != wanted:
        print(f"installing {' '.join(wanted)} in {folder}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True, clear=True)
        extra = ["--extra-index-url", index] if index else []
        if subprocess.run([python, "-m", "pip", "install", "--quiet", *extra, *wanted], stdout=sys.stderr).returncode:
            sys.exit("TRL's environment could not be made; where torch is a build that PyPI has not, name its --index")
        mark.write_text("\n".join(wanted))
    return str(python)


@contextlib.contextmanager
def workers(systems: tuple[str, ...], given: argparse.Namespace, folder: Path) -> Iterator[list[Worker]]:
    iterations = WARM + given.rounds * given.block
    make_files(folder, iterations * PROMPTS)
    started: list[Worker] = []
    try:
        for system in systems:
            python = trl_python(given.venv, given.index) if system == "trl" else sys.executable
            started.append(Worker(system, python, folder, iterations, given.threads))
            started[-1].answer()  # the warm-up, before the next one starts
        yield started
    finally:
        for worker in started:
            worker.close()


def measured(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """System → seconds of every iteration, processor seconds of every block, tokens sampled per iteration."""
    found: dict[str, dict[str, Any]] = {name: {"seconds": [], "processor": [], "tokens": set()} for name in given.systems}
    with tempfile.TemporaryDirectory() as folder, workers(tuple(given.systems), given, Path(folder)) as started:
        begun = time.monotonic()
        for number in range(given.rounds):
            if number >= len(started) and time.monotonic() - begun > given.budget:
                print(f"stopped after {number} rounds: {given.budget:g} s are over", file=sys.stderr)
                break
            turn = number % len(started)
            for worker in started[turn:] + started[:turn]:
                block = worker.block(given.block)
                row = found[worker.system]
                row["seconds"] += block["seconds"]
                row["processor"].append(block["processor"] / given.block)
                row["tokens"].add(block["tokens"] / given.block)
    return found


def summary(found: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per system; ``ratio`` is the median to TRL's."""
    medians = {name: statistics.median(row["seconds"]) for name, row in found.items()}
    return [{"system": name, "median": medians[name], "fastest": min(row["seconds"]), "slowest": max(row["seconds"]),
             "processor": statistics.median(row["processor"]), "iterations": len(row["seconds"]), "tokens": sorted(row["tokens"]),
             "ratio": medians[name] / medians["trl"] if "trl" in medians else None} for name, row in found.items()]


def show(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"seconds per iteration of GRPO, {PROMPTS} prompts × {SAMPLES} samples × {TOKENS} tokens, {given.threads} threads, "
                        f"torch {version('torch')}, transformers {version('transformers')}, {TRL}")
    for head in ("system", "median", "fastest", "slowest", "processor", "× TRL", "iterations", "tokens per iteration"):
        table.add_column(head, justify="left" if head == "system" else "right")
    for row in rows:
        numbers = [f"{row[name]:.3f}" for name in ("median", "fastest", "slowest", "processor")]
        ratio = f"{row['ratio']:.2f}" if row["ratio"] else "-"
        table.add_row(row["system"], *numbers, ratio, str(row["iterations"]), " ".join(f"{count:g}" for count in row["tokens"]))
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--block", type=int, default=4, help="iterations of a system before the next one has its turn")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds after which no further round begins")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    parser.add_argument("--venv", type=Path, default=Path.home() / ".cache" / "rlflow" / "peers" / "trl", help="TRL's environment")
    parser.add_argument("--index", help="a package index that has this torch, where PyPI has not")
    parser.add_argument("--json", action="store_true", help="one line of JSON in place of the table")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        system, folder, iterations = given.worker
        RUNS[system](Path(folder), int(iterations))
        return
    rows = summary(measured(given))
    if given.json:
        versions = {name: version(name) for name in ("torch", "transformers")}
        print(json.dumps({**versions, "trl": TRL, "threads": given.threads, "rows": rows}))
    else:
        show(rows, given)
    if len({count for row in rows for count in row["tokens"]}) > 1:
        sys.exit("the systems did not sample the same number of tokens: their times cannot be compared")


if __name__ == "__main__":
    main()
