"""The full learning runs over seeds, whose figures README shows.

    python benchmarks/learn.py [--algorithms ppo grpo] [--seeds 0 1 2] [--out runs]

Each run is `rlflow run algorithms/X.py --seed S` with no other option, in a process of its own; wall time includes start-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def learned(algorithm: str, seed: int, out: str) -> dict[str, Any]:
    """One run: its last line, with the wall time of the whole process."""
    words = [sys.executable, "-m", "rlflow.cli.main", "run", str(ROOT / "algorithms" / f"{algorithm}.py")]
    start = time.monotonic()
    done = subprocess.run([*words, "--seed", str(seed), "--out", out, "--json", "--quiet"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{algorithm}, seed {seed}: exit {done.returncode}\n{done.stderr}")
    return {"algorithm": algorithm, "seed": seed, "wall": time.monotonic() - start, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=["ppo", "grpo"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", default="runs")
    given = parser.parse_args()
    print("| algorithm | seed | sampled before → after | greedy before → after | iterations | whole process |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    walls = []
    for algorithm in given.algorithms:
        for seed in given.seeds:
            run = learned(algorithm, seed, given.out)
            walls.append(run["wall"])
            print(f"| {algorithm} | {seed} | {run['accuracy_before']:.1%} → {run['accuracy_after']:.1%} | {run['greedy_before']:.1%} → "
                  f"{run['greedy_after']:.1%} | {run['iterations']} | {run['wall']:.0f} s |", flush=True)
    print(f"\nmedian of the whole processes: {statistics.median(walls):.0f} s")


if __name__ == "__main__":
    main()
