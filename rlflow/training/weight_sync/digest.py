"""A digest of a tensor's bits that its layout does not change.

    H = sum over elements of bits(x) * a[0, i] * a[1, j] * … mod 2^64, with odd pseudo-random a

Sums over any boxes that make up a tensor add up to that of the tensor, wherever they lie; elements or rows that changed places, and any
one bit, change it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rlflow.author.seeds import GOLDEN, splitmix
from rlflow.training.weight_sync.boxes import Box

ROWS = 1 << 16  # elements at once: more would take fresh memory from the system each time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(values: Tensor, box: Box) -> int:
    """The digest of the elements of a box, signed 64 bits: one term of the digest of the tensor. ``values`` has the shape of the box and
    any strides."""
    if not values.numel():
        return 0
    if not box:
        return wrapped(int(bits(values)) * int(coefficients(0, 1)[0]))
    rows = max(1, ROWS * values.shape[0] // values.numel())
    parts = [_summed(part, box) for part in torch.split(values, rows)]
    return int((torch.cat(parts) * _coefficients(0, box[0], values.device)).sum())


def _summed(values: Tensor, box: Box) -> Tensor:
    """[rows]: the terms of each row, without the coefficient of the row."""
    terms = bits(values).to(torch.int64)
    for dim in range(values.dim() - 1, 0, -1):
        terms = (terms * _coefficients(dim, box[dim], values.device)).sum(-1)
    return terms


def bits(values: Tensor) -> Tensor:
    """Signed integers of the same bits."""
    return values.detach().contiguous().view(_INTEGERS[values.element_size()])


def _coefficients(dim: int, span: tuple[int, int], device: torch.device) -> Tensor:
    low, high = span
    return coefficients(dim, 1 << (high - 1).bit_length())[low:high].to(device)


@lru_cache(maxsize=64)
def coefficients(dim: int, size: int) -> Tensor:
    """[size] odd numbers by splitmix64, which do not depend on ``size``."""
    return splitmix((torch.arange(size) + (dim << 40)) * GOLDEN) | 1


def wrapped(number: int) -> int:
    """The number modulo 2^64, as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
