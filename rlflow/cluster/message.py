"""What the driver asks of a worker, and what it answers: plain data, no tensors of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Data
from rlflow.columns import Kind
from rlflow.execution.tally import Tally

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Rows of a shard: the worker's own under ``key``, or the next of the transfers that come with the call (None). ``rows``: which,
    None for all in their order. A transfer has just the rows that are wanted."""

    key: int | None
    rows: Index | None = None


@dataclass(frozen=True)
class Source:
    """Columns that lie alike. columns: (name wanted, name in the shard, kind). parts one after another, then put into ``order``."""

    columns: tuple[tuple[str, str, Kind], ...]
    parts: tuple[Part, ...]
    order: Index | None = None


@dataclass(frozen=True)
class Inputs:
    """The batch of a call: keys int64 [rows, 2], where its columns come from, and the scalars."""

    keys: NDArray[np.int64]
    grouped: bool
    sources: tuple[Source, ...]
    scalars: Mapping[str, Data] = field(default_factory=dict)


NOTHING = Inputs(np.zeros((0, 2), np.int64), False, ())


@dataclass(frozen=True)
class Call:
    """One operation on a worker: ``op`` with ``arguments``; what it gives is kept under ``key``."""

    op: str
    key: int
    inputs: Inputs
    iteration: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict)
    forget: tuple[int, ...] = ()  # keys that nobody needs any more

    def __str__(self) -> str:
        """For whoever asks what a worker does."""
        of = self.arguments.get("function") or self.arguments.get("role")
        return f"{self.op}{f' of {of}' if of else ''} in iteration {self.iteration}"


@dataclass(frozen=True)
class Answer:
    """key: what the shard is kept under. rows: how many it has. columns: name → kind and bytes. lengths: by level of the ragged
    columns. scalars come whole; ``value`` is what an operation gives that is no batch. ran: from when to when, by the wall clock, which
    several machines share."""

    key: int = 0
    rows: int = 0
    columns: Mapping[str, tuple[Kind, int]] = field(default_factory=dict)
    lengths: Mapping[str, Index] = field(default_factory=dict)
    scalars: Mapping[str, Data] = field(default_factory=dict)
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    value: Any = None
    ran: tuple[float, float] = (0.0, 0.0)
