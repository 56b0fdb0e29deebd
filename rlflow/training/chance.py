"""Chance as a function: numbers that depend on their seeds alone, not on who else draws, nor on a library's version.

Everything rests on the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
2014) as a hash of (seed, counter). int64 arithmetic wraps as the unsigned arithmetic of the paper does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed number
_MIX = ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1))


def signed(seed: int) -> int:
    """The int64 with the lowest 64 bits of ``seed``."""
    return (seed + 2**63) % 2**64 - 2**63


def splitmix(x: Tensor) -> Tensor:
    """A bijection of int64 [...] whose outputs look independent, even of neighbouring inputs."""
    return finalised(x + _GOLDEN)


def finalised(x: Tensor) -> Tensor:
    """The finaliser alone, which leaves 0 as it is."""
    for shift, factor in _MIX:
        x = (x ^ (x >> shift & (1 << 64 - shift) - 1)) * factor  # a logical shift: torch's keeps the sign
    return x


def mixed(*numbers: int) -> int:
    """One seed from several numbers; their order matters."""
    state = torch.zeros((), dtype=torch.int64)
    for number in numbers:
        state = splitmix(state ^ signed(number))
    return int(state)


def uniforms(seeds: Sequence[int], steps: int) -> Tensor:
    """float64 [len(seeds), steps] in [0, 1 - 2⁻⁵²]: entry (i, t) is a function of (seeds[i], t)."""
    return _uniform(seeds, torch.arange(steps))


def uniforms_at(seeds: Sequence[int], steps: Sequence[int]) -> Tensor:
    """float64 [len(seeds)]: entry (i, steps[i]) of ``uniforms``."""
    return _uniform(seeds, torch.tensor(steps, dtype=torch.int64)[:, None])[:, 0]


def _uniform(seeds: Sequence[int], steps: Tensor) -> Tensor:
    """``steps`` is the same for all seeds, or has a row for each."""
    rows = splitmix(torch.tensor([signed(int(seed)) for seed in seeds], dtype=torch.int64))
    bits = splitmix(rows[:, None] + steps * _GOLDEN)
    return (bits >> 12 & 2**52 - 1).double() * 2.0**-52


def permutation(count: int, *seeds: int) -> Tensor:
    """int64 [count]: 0 … count-1 in an order drawn from ``seeds``."""
    return torch.argsort(splitmix(torch.arange(count) ^ mixed(*seeds)), stable=True)
