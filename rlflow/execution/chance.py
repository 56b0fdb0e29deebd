"""Chance: every draw has a seed derived from (run seed, iteration, call in program order, row key). There is no global generator.

A row key is (position in the data stream, sample number), so what is drawn for a row does not depend on where, when or beside
which other rows it runs.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from rlflow.training.chance import finalised

_ODD = (0x9E3779B97F4A7C15 - 2**64, 0xD1B54A32D192ED03 - 2**64)


def derived(*parts: int | str) -> int:
    """A 63-bit seed from integers and names."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def row_seeds(base: int, keys: Tensor) -> list[int]:
    """A 63-bit seed for each row key [rows, 2] (splitmix64 over the key, Steele et al. 2014)."""
    mixed = torch.full((len(keys),), base, dtype=torch.int64)
    for column, odd in enumerate(_ODD):
        mixed = finalised(mixed ^ (keys[:, column] + 1) * odd)
    return [int(seed) for seed in (mixed & (2**63 - 1)).tolist()]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
