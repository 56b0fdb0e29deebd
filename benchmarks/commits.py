"""What commits cost a run on pools: seconds per iteration with `--commit-every` 0, 1 and 10. Interleaved by blocks, medians.

    python benchmarks/commits.py [--rounds 7] [--pools all=1] [--prompts 16]

Every setting has the same workers, which take turns by blocks of ten iterations. Processor seconds are those of the driver and of all
workers: on a machine that does other things too they are what to compare. The last line is one commit alone, while nothing else runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch
from overhead import prepared

from rlflow.runs.context import RunContext

BLOCK = 10
SETTINGS = (0, 1, 10)
TICKS = os.sysconf("SC_CLK_TCK")


def processor(pids: list[int]) -> float:
    """Seconds of processor time of these processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / TICKS


class Run:
    """Iterations on pools, with commits or without."""

    def __init__(self, run: RunContext) -> None:
        self.run, self.last, self.iteration = run, None, 0
        assert run.workers is not None
        self.workers = run.workers
        self.pids = [os.getpid(), *(worker.presence.process.pid for worker in run.workers.fleet.watched)]  # type: ignore[attr-defined]

    def block(self, every: int) -> tuple[float, float]:
        """Seconds, and processor seconds, of an iteration."""
        start, used = time.perf_counter(), processor(self.pids)
        for number in range(BLOCK):
            if every and number % every == 0:
                if self.last is not None:
                    assert self.last.settled(60.0)
                self.last = self.workers.commit(self.iteration)
            self.run.engine.iteration = self.iteration
            self.run.executor.run(self.run.plan, self.run.prompts.take(self.run.options.prompts))
            self.iteration += 1
        return (time.perf_counter() - start) / BLOCK, (processor(self.pids) - used) / BLOCK

    def alone(self) -> tuple[float, int]:
        """Seconds and bytes of one commit."""
        start = time.perf_counter()
        commit = self.workers.commit(self.iteration)
        assert commit.settled(60.0)
        return time.perf_counter() - start, sum(copy.size.result() for copy in commit.copies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pools", default="all=1")
    parser.add_argument("--prompts", type=int, default=16)
    options = parser.parse_args()
    made = prepared("ppo", pools=options.pools, prompts=options.prompts, held_out=8, iterations=1000, threads=1)
    try:
        run = Run(made)
        run.block(1)  # warms up
        found = {every: list[tuple[float, float]]() for every in SETTINGS}
        for number in range(options.rounds):
            for every in SETTINGS[number % len(SETTINGS):] + SETTINGS[: number % len(SETTINGS)]:
                found[every].append(run.block(every))
        alone = [run.alone() for _ in range(options.rounds)]
    finally:
        made.close()
    print(f"torch {torch.__version__}, pools {options.pools}, {made.options.prompts} prompts, {options.rounds} blocks of {BLOCK} each")
    print("| --commit-every | seconds, median | fastest | processor seconds, median | fastest |\n| ---: | ---: | ---: | ---: | ---: |")
    for every, blocks in found.items():
        numbers = [f"{pick(each):.3f}" for each in zip(*blocks, strict=True) for pick in (statistics.median, min)]
        print(f"| {every} | {' | '.join(numbers)} |")
    print(f"a commit alone: {alone[0][1] / 1e6:.1f} MB in {statistics.median(seconds for seconds, _ in alone):.3f} s (median)")


if __name__ == "__main__":
    main()
