"""Seconds per iteration with --staleness 0, 1 and 2 on two pools of one rank, where sampling takes as long as training.

    python benchmarks/staleness.py [--iterations 12] [--seconds 1]

Sampling and the update of the null backend take --seconds each and no processor, so what is measured is what overlaps. The first
iteration has nothing to overlap with and is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile

import rlflow


def measured(staleness: int, iterations: int, seconds: float, out: str) -> tuple[list[float], float]:
    """Seconds of each iteration after the first, and the bound that the run gives."""
    run = rlflow.run("grpo", backend="null", prompts=8, iterations=iterations, threads=1, save_every=0, out=out, staleness=staleness,
                     pools="train=1,rollout=1", generate_seconds=seconds, update_seconds=seconds,
                     **{"hp.samples": 2, "hp.max_tokens": 8})  # fmt: skip
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    return [line["seconds"] for line in lines][1:], run.totals.bounds.bound


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=1.0)
    given = parser.parse_args()
    print(f"sampling {given.seconds:g} s, update {given.seconds:g} s, {given.iterations} iterations")
    with tempfile.TemporaryDirectory() as out:
        for staleness in (0, 1, 2):
            found, bound = measured(staleness, given.iterations, given.seconds, out)
            print(f"staleness {staleness}: {statistics.median(found):.3f} s per iteration (median; {min(found):.3f} to {max(found):.3f}), "
                  f"bound {bound:.3f} s", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
