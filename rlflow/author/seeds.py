"""Seeds, and random numbers computed from seeds alone, without a global generator.

A draw depends neither on other draws nor on a library's version. Each draw in a run has its own seed, derived
from the run's seed, the iteration, the call and the row (its position in the data stream and its sample
number). So it doesn't matter where or when a row is computed, or together with which other rows.

The hash of (seed, counter) is the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", 2014). int64 arithmetic wraps around just like the paper's unsigned
arithmetic.
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
    """Return the lowest 64 bits of ``seed`` as an int64."""
    return (seed + 2**63) % 2**64 - 2**63


def splitmix(x: Tensor) -> Tensor:
    """Hash int64 values one to one. Even neighbouring inputs give results that look independent."""
    return finalised(x + GOLDEN)


def finalised(x: Tensor) -> Tensor:
    """Apply just the finaliser of splitmix64 to int64 values. 0 stays 0."""
    for shift, factor in _MIX:
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor  # a logical shift: torch's keeps the sign
    return x


def mixed(*numbers: int) -> int:
    """Derive one seed from several numbers, whose order matters."""
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
    """Return entry (i, steps[i]) of ``uniforms`` for each i, float64 [len(seeds)]."""
    return _uniform(seeds, torch.tensor(steps, dtype=torch.int64)[:, None])[:, 0]


def _uniform(seeds: Sequence[int], steps: Tensor) -> Tensor:
    """Return uniform random numbers for each seed. ``steps`` has one row for all seeds, or one per seed."""
    rows = splitmix(torch.tensor([signed(int(seed)) for seed in seeds], dtype=torch.int64))
    bits = splitmix(rows[:, None] + steps * GOLDEN)
    return (bits >> 12 & 2**52 - 1).double() * 2.0**-52


def permutation(count: int, *seeds: int) -> Tensor:
    """Return the numbers 0 … count-1 in a random order that depends on ``seeds``, int64 [count]."""
    return torch.argsort(splitmix(torch.arange(count) ^ mixed(*seeds)), stable=True)


def derived(*parts: int | str) -> int:
    """Derive a 63-bit seed from integers and names."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def row_seeds(base: int, keys: Tensor) -> list[int]:
    """Derive a 63-bit seed for each row from ``base`` and the row's path. ``keys``: [rows, 2 or more]."""
    state = torch.full((len(keys),), base, dtype=torch.int64)
    for column, odd in zip(range(keys.shape[1]), itertools.cycle(_KEY_FACTORS), strict=False):
        state = finalised(state ^ (keys[:, column] + 1) * odd)
    return [int(seed) for seed in (state & (2**63 - 1)).tolist()]


def turn_seeds(seeds: Sequence[int], turn: int) -> list[int]:
    """Derive each row's 63-bit seed for the given turn from the row's seed.

    In turn 0, it's the row's seed itself.
    """
    if not turn:
        return list(seeds)
    state = finalised(
        torch.tensor([signed(seed) for seed in seeds], dtype=torch.int64) ^ signed(turn * _KEY_FACTORS[1])
    )
    return [int(seed) for seed in (state & (2**63 - 1)).tolist()]


def generator(seed: int) -> torch.Generator:
    """Return a CPU torch generator with this seed."""
    return torch.Generator().manual_seed(seed)
