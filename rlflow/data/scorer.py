"""The scorer of a row as plain data, from which a process without the data set can build it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

if TYPE_CHECKING:
    from rlflow.author.columns import Kind


@dataclass(frozen=True)
class ScorerSpec:
    """The description of a scorer of rows, from which a process makes it."""

    kind: str  # match, math, reasoning_gym or function
    reads: tuple[str, ...] = ("completion", "answer")  # row columns that it needs
    optional: tuple[str, ...] = ()  # row columns that it takes where a batch has them
    settings: Mapping[str, Any] = field(default_factory=dict)  # arguments of its kind, plain values

    @cached_property
    def packed(self) -> dict[str, Any]:
        """Kind and settings, from which a worker process builds the scorer."""
        return {"kind": self.kind, "settings": dict(self.settings)}

    @cached_property
    def key(self) -> str:
        """16 hex digits of a SHA-256 over kind and settings, by which a process knows a scorer that it has
        loaded."""
        return hashlib.sha256(msgpack.packb(self.packed, unicode_errors="surrogatepass")).hexdigest()[:16]


MATCH = ScorerSpec("match")


class Judged(Protocol):
    """The parts of a data set that rewards need."""

    @property
    def columns(self) -> Mapping[str, Kind]:
        """Name → kind of the columns of its rows."""

    @property
    def scorer(self) -> ScorerSpec | None:
        """The scorer of the reward ``task``; None where the data has none."""

    @property
    def sources(self) -> Mapping[str, DataShape]:
        """Columns and scorer of each of several sources, by its name; empty where there is one."""


@dataclass(frozen=True)
class DataShape:
    """Facts of a data set that rewards need, without its records."""

    columns: Mapping[str, Kind]  # name → kind of the columns of its rows
    scorer: ScorerSpec | None  # of the reward ``task``
    sources: Mapping[str, DataShape] = field(default_factory=dict)  # of several sources, each by its name
