"""Compare two products for the language-model head on few float32 rows: hidden · weightᵀ, weight · hiddenᵀ.

    python benchmarks/head.py [--vocabulary 262144] [--hidden 640] [--rounds 5]

`backends/local/head.py` computes weight · hiddenᵀ. The table shows median milliseconds over alternating
rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from rlflow.backends.local.head import turned

ROWS = (1, 2, 4, 6, 8, 10, 12, 16, 32, 64)


def milliseconds(action: Callable[[], Tensor]) -> float:
    """Return the time of a call in milliseconds: the mean of three calls after a warm-up call."""
    action()
    start = time.perf_counter()
    for _ in range(3):
        action()
    return (time.perf_counter() - start) / 3 * 1e3


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"vocabulary": 262144, "hidden": 640, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    weight = torch.randn(given.vocabulary, given.hidden)
    print("| rows | hidden · weightᵀ | weight · hiddenᵀ |\n| ---: | ---: | ---: |")
    for rows in ROWS:
        hidden = torch.randn(rows, given.hidden)
        ways: list[Callable[[], Tensor]] = [
            partial(nn.functional.linear, hidden, weight),
            partial(turned, weight, hidden),
        ]
        taken = [[milliseconds(way) for way in ways] for _ in range(given.rounds)]
        print(
            f"| {rows} | "
            + " | ".join(f"{statistics.median(column):.1f}" for column in zip(*taken, strict=True))
            + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
