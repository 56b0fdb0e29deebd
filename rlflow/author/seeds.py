"""Seeds, and random numbers that depend only on seeds, without a global generator.

A draw does not depend on other draws or on a library's version. Every draw of a run has a seed that is
derived from the run's seed, the iteration, the call, and the row (its position in the data stream and its
sample number). So the draws of a row do not depend on where or when the row is computed, or with which other
rows.

The hash of (seed, counter) is the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014). int64 arithmetic wraps like the unsigned arithmetic of the paper.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
# odd factors for the numbers of a row key, used alternately
_KEY_FACTORS = (GOLDEN, 0xD1B54A32D192ED03 - 2**64)
_MIX = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))


def signed(seed: int) -> int:
    """Return the int64 with the lowest 64 bits of ``seed``."""
    return (seed + 2**63) % 2**64 - 2**63


def splitmix(x: Tensor) -> Tensor:
    """Map int64 values one to one to values that look independent, even for neighbouring inputs."""
    return finalised(x + GOLDEN)


def finalised(x: Tensor) -> Tensor:
    """Apply only the finaliser of splitmix64 to int64 values. It maps 0 to 0."""
    for shift, factor in _MIX:
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor  # a logical shift: torch's keeps the sign
    return x


def mixed(*numbers: int) -> int:
    """Derive one seed from several numbers. Their order matters."""
    state = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        state = splitmix(state ^ signed(number))
    return int(state)


def uniforms(seeds: Sequence[int], steps: int) -> Tensor:
    """Return uniform random numbers in [0, 1 - 2⁻⁵²], float64 [len(seeds), steps].

    Entry (i, t) depends only on (seeds[i], t).
    """
    return _uniform(seeds, torch.arange(steps))


def uniforms_at(seeds: Sequence[int], steps: Sequence[int]) -> Tensor:
    """For each i, return the entry (i, steps[i]) of ``uniforms``, float64 [len(seeds)]."""
    return _uniform(seeds, torch.tensor(steps, dtype=torch.int64)[:, None])[:, 0]


def _uniform(seeds: Sequence[int], steps: Tensor) -> Tensor:
    """Return uniform random numbers for each seed at ``steps``.

    ``steps`` is the same for all seeds, or has one row per seed.
    """
    rows = splitmix(torch.tensor([signed(int(seed)) for seed in seeds], dtype=torch.int64))
    bits = splitmix(rows[:, None] + steps * GOLDEN)
    return (bits >> 12 & 2**52 - 1).double() * 2.0**-52


def permutation(count: int, *seeds: int) -> Tensor:
    """Return the numbers 0 … count-1 in an order that is drawn from ``seeds``, int64 [count]."""
    return torch.argsort(splitmix(torch.arange(count) ^ mixed(*seeds)), stable=True)


def derived(*parts: int | str) -> int:
    """Derive one 63-bit seed from integers and names."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def row_seeds(base: int, keys: Tensor) -> list[int]:
    """Derive a 63-bit seed for each row from ``base`` and the row's path. ``keys``: [rows, 2 or more]."""
    state = torch.full((len(keys),), base, dtype=torch.int64)
    for column, odd in zip(range(keys.shape[1]), itertools.cycle(_KEY_FACTORS), strict=False):
        state = finalised(state ^ (keys[:, column] + 1) * odd)
    return [int(seed) for seed in (state & (2**63 - 1)).tolist()]


def turn_seeds(seeds: Sequence[int], turn: int) -> list[int]:
    """Derive a 63-bit seed for the turn ``turn`` of each row from the row's seed.

    In turn 0, it is the row's own seed.
    """
    if not turn:
        return list(seeds)
    state = finalised(
        torch.tensor([signed(seed) for seed in seeds], dtype=torch.int64) ^ signed(turn * _KEY_FACTORS[1])
    )
    return [int(seed) for seed in (state & (2**63 - 1)).tolist()]


def generator(seed: int) -> torch.Generator:
    """Return a torch generator with this seed, on the CPU."""
    return torch.Generator().manual_seed(seed)
