"""Simulate how often verdicts of learning are wrong, and how often they find a true difference.

``python tests/benchmarks/simulated.py`` prints the table of docs/bench.md, by seeds, pairs and distributions.
"""

import numpy as np

from rlflow.benchmarks.curves import Cell, Curve, Point
from rlflow.benchmarks.holm import holm
from rlflow.benchmarks.learning import ALPHA, surprise

# EFFECT: in standard deviations of one cell's own noise
SEEDS, CELLS, EFFECT, DRAWS = (5, 6, 8, 10, 12, 16), (1, 3, 5), 1.5, 2000
QUESTIONS, RIGHT = 512, 0.9  # of binomial accuracies
OWN = {  # noise of each run, with a standard deviation of 1
    "normal": lambda rng, shape, common: common + rng.normal(size=shape),
    "skewed": lambda rng, shape, common: common + rng.exponential(size=shape),
    "binomial": lambda rng, shape, common: (
        rng.binomial(QUESTIONS, RIGHT + 0.01 * np.clip(common, -5, 5), shape) / DEVIATION
    ),
}
DEVIATION = (QUESTIONS * RIGHT * (1 - RIGHT)) ** 0.5


def cell(name, values, first):
    return Cell(
        name,
        tuple(
            Curve(seed, (Point(0, 0, 0, 0.0), Point(9, 1, 1, float(value))))
            for seed, value in enumerate(values, first)
        ),
    )


def share(distribution, seeds, cells, paired, effect, draws, seed=0):
    """Return the share of ``draws`` comparisons in which any cell is found better or worse than the base.

    ``paired``: all cells have the same seeds, and the shared noise of a seed is as large as a run's own noise;
    ``effect``: added to each cell except the base.
    """
    rng = np.random.default_rng([seed, seeds, cells, paired])
    found = 0
    for _ in range(draws):
        common = rng.normal(size=seeds) if paired else np.zeros((cells + 1, 1))
        values = OWN[distribution](rng, (cells + 1, seeds), common)
        values[1:] += effect
        base, *others = (
            cell(str(number), row, 0 if paired else 100 * number) for number, row in enumerate(values)
        )
        found += any(
            rejected
            for _, rejected in holm({each.name: surprise(each, base) for each in others}, ALPHA).values()
        )
    return found / draws


def rows():
    """Yield the lines of the table: (seeds, distribution, wrong or found, shares by number of seeds)."""
    for paired in (True, False):
        for distribution in OWN:
            wrong = [
                [share(distribution, count, cells, paired, 0.0, DRAWS) for cells in CELLS] for count in SEEDS
            ]
            right = [[share(distribution, count, 1, paired, EFFECT, DRAWS)] for count in SEEDS]
            pairs = "the same" if paired else "others"
            yield from ((pairs, distribution, "wrong", wrong), (pairs, distribution, "found", right))


def table(simulated):
    """Return ``rows`` as a Markdown table."""
    lines = [
        f"| seeds of both | values | % of comparisons | {' | '.join(map(str, SEEDS))} |",
        "| --- " * 3 + "| ---: " * len(SEEDS) + "|",
    ]
    for pairs, distribution, what, values in simulated:
        label = "wrong, with 1, 3, 5 cells" if what == "wrong" else "found"
        shown = [
            ", ".join(f"{100 * value:.0f}" if what == "found" else f"{100 * value:.1f}" for value in each)
            for each in values
        ]
        lines.append(f"| {pairs} | {distribution} | {label} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(rows()))
