"""Measure the median time to score a row in a warm process. Optionally compare another checkout of rlflow.

    python benchmarks/rewards.py [--rows 512] [--turns 5] [--against FOLDER]

Rows come from the packaged arithmetic task, and from a reasoning-gym task whose scorer evaluates text as
code. The two checkouts alternate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rlflow.data import gym
from rlflow.data.scorer import MATCH, ScorerSpec
from rlflow.rewards import RewardPool

CALLS = 10  # timed calls in a process


def measured(scorer: ScorerSpec, names: list[str], row: list[str], rows: int) -> float:
    """Return the median milliseconds per row. A first call, which starts the process, is not counted."""
    with RewardPool(1) as pool:
        seconds = []
        for _ in range(CALLS + 1):
            began = time.perf_counter()
            values = pool.score(scorer, names, [row] * rows).values
            seconds.append(time.perf_counter() - began)
            assert values == [1.0] * rows
    return statistics.median(seconds[1:]) / rows * 1e3


def one_side(rows: int) -> None:
    """Print the milliseconds per row of both tasks for this checkout."""
    entry = '{"answer": "3 + 4", "metadata": {"source_dataset": "countdown", "numbers": [3, 4], "target": 7}}'
    packaged = measured(MATCH, ["completion", "answer"], ["42", "42"], rows)
    evaluated = measured(gym.scorer("countdown", {}), ["completion", "entry"], ["3 + 4", entry], rows)
    print(packaged, evaluated)


def other_process(folder: str, rows: int) -> list[float]:
    """Measure another checkout in a separate process, and return its milliseconds per row."""
    environment = {**os.environ, "PYTHONPATH": folder}
    command = [sys.executable, __file__, "--rows", str(rows), "--turns", "0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--against", help="folder of the other checkout")
    options = parser.parse_args()
    if not options.turns:
        one_side(options.rows)
        return
    here = str(Path(__file__).parents[1])
    sides = {"here": here} | ({"there": options.against} if options.against else {})
    found: dict[str, list[list[float]]] = {name: [] for name in sides}
    for turn in range(options.turns):
        for name in list(sides)[:: 1 if turn % 2 else -1]:
            found[name].append(other_process(sides[name], options.rows))
    for name, turns in found.items():
        packaged, evaluated = (statistics.median(column) for column in zip(*turns, strict=True))
        print(
            f"{name}: {packaged:.3f} ms per row of the packaged task, {evaluated:.3f} ms per row of countdown; "
            f"{options.rows} rows, median of {options.turns} turns"
        )


if __name__ == "__main__":
    main()
