"""Suites simulated from recorded noise: stretches of recorded blocks, assigned to two cells in rotating order."""

import json
from pathlib import Path

import numpy as np

from rlflow.benchmarks.speed import Block

NOISE = json.loads((Path(__file__).parent / "noise.json").read_text())
STRETCH = 20  # consecutive blocks, so that a disturbance affects neighbouring blocks as recorded


def stretches(series, count, rng):
    starts = rng.integers(0, len(series), -(-count // STRETCH))
    return np.concatenate([np.take(series, range(start, start + STRETCH), mode="wrap") for start in starts])[
        :count
    ]


def suite(series, rounds, factor, rng):
    """Simulate two alternating cells; the order is reversed every other round.

    The first cell takes ``factor`` times as long.
    """
    blocks = stretches(series, 2 * rounds, rng).reshape(rounds, 2)
    blocks[1::2] = blocks[1::2, ::-1].copy()
    return cells(blocks * np.array([factor, 1.0]))


def cells(seconds):
    """Return the blocks of the cells "cell" and "base" from seconds [rounds, 2]."""
    return {
        name: [Block(number, float(value)) for number, value in enumerate(column)]
        for name, column in zip(("cell", "base"), np.asarray(seconds).T, strict=True)
    }
