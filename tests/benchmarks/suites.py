"""Suites simulated from recorded noise: contiguous stretches of recorded blocks, dealt to two cells as a
bench does."""

import json
from pathlib import Path

import numpy as np

from rlflow.benchmarks.speed import Block

NOISE = json.loads((Path(__file__).parent / "noise.json").read_text())
STRETCH = 20  # blocks in a row, so that what slows a block slows its neighbours as it did


def stretches(series, count, rng):
    starts = rng.integers(0, len(series), -(-count // STRETCH))
    return np.concatenate([np.take(series, range(start, start + STRETCH), mode="wrap") for start in starts])[
        :count
    ]


def suite(series, rounds, factor, rng):
    """Two cells that take turns, the order turned round every other round; the first takes ``factor`` times
    as long."""
    blocks = stretches(series, 2 * rounds, rng).reshape(rounds, 2)
    blocks[1::2] = blocks[1::2, ::-1].copy()
    return cells(blocks * np.array([factor, 1.0]))


def cells(seconds):
    """Blocks of the cells "cell" and "base" from [rounds, 2]."""
    return {
        name: [Block(number, float(value)) for number, value in enumerate(column)]
        for name, column in zip(("cell", "base"), np.asarray(seconds).T, strict=True)
    }
