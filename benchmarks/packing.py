"""Compare packed and padded training on rows with shared prompts.

Packed training runs each prompt through the model once. Padded training runs each row through the model
separately.

    python benchmarks/packing.py [--model FOLDER] [--dtype float32] [--prompts 4] [--samples 8] [--prompt 190]
                                 [--tokens 256] [--rounds 5] [--ways padded packed compiled]

It measures log-probs of random tokens, without and with their gradient. Responses have --tokens tokens; with
0, the default, they have the lengths of `rlflow bench peers`. "compiled" is packed rows with `--ROLE.compile
true`. Each variant runs in its own process with one thread. The processes alternate.

The table shows median CPU seconds, the peak memory of a process, and the seconds of loading, which include
compiler processes. The default model is the one of `rlflow bench peers`: a Qwen3 with 0.8M parameters.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rlflow.author.batch import Batch
from rlflow.backends.local import Trainer
from rlflow.benchmarks.suites.fixed_shape import LENGTHS, make
from rlflow.training.protocols import ModelSpec

WAYS = {
    "padded": {"packed": False},
    "packed": {"packed": True},
    "compiled": {"packed": True, "compile": True},
}


def rows_of(given: argparse.Namespace, vocabulary: int) -> Batch:
    """Return rows of random tokens, grouped by prompt."""
    rng = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(3, vocabulary, (count,), generator=rng).tolist()  # noqa: E731
    count = given.prompts * given.samples
    lengths = [given.tokens] * count if given.tokens else json.loads(LENGTHS.read_text())["lengths"][:count]
    prompts = [draw(given.prompt) for _ in range(given.prompts)]
    return Batch.of(
        prompt_tokens=[prompt for prompt in prompts for _ in range(given.samples)],
        tokens=[draw(n) for n in lengths],
        mask=[[True] * n for n in lengths],
    )


def seconds(call: Callable[[], object]) -> float:
    """Return the CPU seconds used by a call."""
    begin = time.process_time()
    call()
    return time.process_time() - begin


def learn(trainer: Trainer, rows: Batch) -> None:
    """Run forward and backward passes for all micro-batches, without an optimizer step."""
    for micro in trainer._micros(rows):
        new = trainer.compute(rows.rows(micro), ("logprobs",))
        assert new.logprobs is not None
        trainer.backward(new.logprobs.sum())
    for parameter in trainer.network.parameters().values():
        parameter.grad = None


def processor_seconds() -> float:
    """Return the CPU seconds used by this process and by its child processes that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def way(given: argparse.Namespace, settings: dict[str, bool], line: Connection) -> None:
    """Run one variant in this process. For each message on ``line``, run a round and send its seconds.

    At the end, send the peak memory in MiB and the seconds of loading.
    """
    torch.set_num_threads(1)
    begin = processor_seconds()
    trainer = Trainer(ModelSpec(given.model, trained=True, dtype=given.dtype), Trainer.Settings(**settings))
    loading = processor_seconds() - begin
    rows = rows_of(given, trainer.network.vocabulary)
    while line.recv():
        line.send((seconds(lambda: trainer.forward(rows)), seconds(lambda: learn(trainer, rows))))
    line.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, loading))


def measured(given: argparse.Namespace) -> None:
    """Measure all variants, and print the table."""
    spawn = multiprocessing.get_context("spawn")
    lines = {}
    for name in given.ways:
        lines[name], theirs = spawn.Pipe()
        # the process is not a daemon, because it may start compilers
        spawn.Process(target=way, args=(given, WAYS[name], theirs)).start()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in given.ways}
    for turn in range(given.rounds + 1):  # the first round warms up
        for name, line in lines.items():
            line.send(True)
            found[name] += [line.recv()] if turn else [line.recv()][:0]
    print(
        "| rows | log-probs, s | with gradient, s | peak, MiB | to load, s |\n| --- | ---: | ---: | ---: "
        "| ---: |"
    )
    for name, line in lines.items():
        line.send(False)
        forward, both = (statistics.median(column) for column in zip(*found[name], strict=True))
        peak, loading = line.recv()
        print(f"| {name} | {forward:.3f} | {both:.3f} | {peak:.0f} | {loading:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    for name, default in {"prompts": 4, "samples": 8, "prompt": 190, "tokens": 0, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.model is None:
            make(Path(folder))
            given.model = Path(folder) / "model"
        measured(given)


if __name__ == "__main__":
    main()
