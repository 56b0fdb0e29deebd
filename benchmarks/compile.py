"""Measure the time to trace and check a flow, warm: `python benchmarks/compile.py [ALGORITHM] [--repeats N]`.

Prints median milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time

from rlflow.author.load import load_flow
from rlflow.compiler.check.checker import check
from rlflow.compiler.trace.compile import compile_flow


def milliseconds(repeats: int, call) -> float:
    """Return the median time of a call in milliseconds, after one warm-up call."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("algorithm", nargs="?", default="ppo")
    parser.add_argument("--repeats", type=int, default=50)
    arguments = parser.parse_args()
    flow = load_flow(arguments.algorithm)
    print(f"{flow.name}: compile {milliseconds(arguments.repeats, lambda: compile_flow(flow)):.2f} ms")
    print(f"{flow.name}: check of all variants {milliseconds(arguments.repeats, lambda: check(flow)):.2f} ms")


if __name__ == "__main__":
    main()
