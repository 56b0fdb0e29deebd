"""The full learning runs, whose figures README (over seeds) and docs/algorithms.md (of every algorithm) show.

    python benchmarks/learn.py [--algorithms ppo grpo] [--seeds 0 1 2] [--out runs]
    python benchmarks/learn.py --algorithms ppo --seeds 0 --with "--pools train=1,rollout=1 --staleness 1"
    python benchmarks/learn.py --without-times [--algorithms …]      # by default every algorithm, one seed

Each run is `rlflow run algorithms/X.py --seed S` with no other option but those of --with, in a process of its own; wall time includes
start-up.
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
ALL = sorted(path.stem for path in (ROOT / "algorithms").glob("[!_]*.py"))


def learned(algorithm: str, seed: int, out: str, options: str = "") -> dict[str, Any]:
    """One run: its last line, with the wall time of the whole process."""
    words = [sys.executable, "-m", "rlflow.cli.main", "run", str(ROOT / "algorithms" / f"{algorithm}.py")]
    start = time.monotonic()
    words += ["--seed", str(seed), "--out", out, "--json", "--quiet", *options.split()]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{algorithm}, seed {seed}: exit {done.returncode}\n{done.stderr}")
    return {"algorithm": algorithm, "seed": seed, "wall": time.monotonic() - start, **json.loads(done.stdout.splitlines()[-1])}


def accuracies(run: dict[str, Any]) -> str:
    """Sampled and greedy accuracy, the latter empty where the flow says itself how it is evaluated; of a reward model the share of pairs
    that it orders, in its first and last five iterations."""
    if run["accuracy_before"] is not None:
        greedy = f"{run['greedy_before']:.1%} → {run['greedy_after']:.1%}" if run["greedy_before"] is not None else ""
        return f"{run['accuracy_before']:.1%} → {run['accuracy_after']:.1%} | {greedy}"
    lines = [json.loads(line) for line in (Path(run["run"]) / "metrics.jsonl").read_text().splitlines()]
    ordered = [line["reward.update/accuracy"] for line in lines if "reward.update/accuracy" in line]
    return f"pairs: {statistics.fmean(ordered[:5]):.1%} → {statistics.fmean(ordered[-5:]):.1%} |"


def with_times(algorithms: list[str], seeds: list[int], out: str, options: str) -> None:
    print("| algorithm | seed | sampled before → after | greedy before → after | iterations | whole process |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    walls = []
    for algorithm in algorithms:
        for seed in seeds:
            run = learned(algorithm, seed, out, options)
            walls.append(run["wall"])
            print(f"| {algorithm} | {seed} | {accuracies(run)} | {run['iterations']} | {run['wall']:.0f} s |", flush=True)
    print(f"\nmedian of the whole processes: {statistics.median(walls):.0f} s")


def without_times(algorithms: list[str], seed: int, out: str, options: str) -> None:
    print("| algorithm | sampled before → after | greedy before → after | iterations |")
    print("| --- | ---: | ---: | ---: |")
    for algorithm in algorithms:
        run = learned(algorithm, seed, out, options)
        print(f"| {algorithm} | {accuracies(run)} | {run['iterations']} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=ALL)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--without-times", action="store_true")
    parser.add_argument("--with", dest="options", default="", help="more flags of each run, in one word")
    parser.add_argument("--out", default="runs")
    given = parser.parse_args()
    if given.without_times:
        without_times(given.algorithms or ALL, (given.seeds or [0])[0], given.out, given.options)
    else:
        with_times(given.algorithms or ["ppo", "grpo"], given.seeds or [0, 1, 2], given.out, given.options)


if __name__ == "__main__":
    main()
