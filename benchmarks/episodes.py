"""Measure the cost of an environment that sends no messages: iterations with and without it, on two backends.

    python benchmarks/episodes.py [--pairs 30]

Both runs use GRPO on the packaged task (64 prompts × 8 samples) in one process. A pair is one iteration of
each run; the order alternates. On the null backend, an iteration waits for as long as the measured iteration
on the local backend.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from overhead import prepared

SILENT = "from rlflow import Turn\n\nclass Silent:\n    def step(self, said):\n        return Turn()\n"


def seconds(run: Any) -> float:
    """Run one iteration, and return its wall seconds."""
    start = time.perf_counter()
    run.executor.run(run.plan, run.prompts.take(64))
    return time.perf_counter() - start


def ratio(pairs: int, folder: str, **keywords: Any) -> tuple[float, float, float]:
    """Return (median seconds without the environment, median seconds with it, median ratio of the pairs).

    ``keywords``: settings of both runs.
    """
    common = {"held_out": 0, "threads": 1, "reward": ("task",), **keywords}
    plain, silent = prepared("grpo", **common), prepared("grpo", **common, env=f"{folder}/silent.py:Silent")
    try:
        for run in (plain, silent):
            seconds(run)  # the first iteration starts processes
        sandboxes = []
        for number in range(pairs):
            both = [seconds(run) for run in ((plain, silent) if number % 2 else (silent, plain))]
            sandboxes.append(tuple(both) if number % 2 else tuple(reversed(both)))
    finally:
        plain.close()
        silent.close()
    return (
        *(statistics.median(column) for column in zip(*sandboxes, strict=True)),
        statistics.median(b / a for a, b in sandboxes),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=30)
    pairs = parser.parse_args().pairs
    print(f"torch {torch.__version__}, 1 thread, {pairs} pairs")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "silent.py").write_text(SILENT)
        without, with_it, factor = ratio(pairs, folder)
        print(
            f"local: {without:.3f} s without, {with_it:.3f} s with an environment that sends no messages: "
            f"{factor:.3f} times"
        )
        half = without / 2
        null = {
            "backend": "null",
            "data": "reasoning_gym:chain_sum",
            "actor.generate_seconds": half,
            "actor.update_seconds": half,
        }
        without, with_it, factor = ratio(pairs, folder, **null)
        print(f"null: {without:.3f} s without, {with_it:.3f} s with it: {factor:.3f} times")


if __name__ == "__main__":
    main()
