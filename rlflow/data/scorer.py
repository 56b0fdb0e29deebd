"""Describe the scorer of rows as plain data, so that a process without the data set can build the scorer."""

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
    """Description of a row scorer. A process builds the scorer from it."""

    kind: str  # match, math, reasoning_gym or function
    reads: tuple[str, ...] = ("completion", "answer")  # row columns that it requires
    optional: tuple[str, ...] = ()  # row columns that it uses if a batch has them
    # arguments for this kind of scorer, as plain values
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def packed(self) -> dict[str, Any]:
        """Kind and settings, from which a worker process builds the scorer."""
        return {"kind": self.kind, "settings": dict(self.settings)}

    @cached_property
    def key(self) -> str:
        """16 hex digits of a SHA-256 over kind and settings.

        A process uses the key to recognise a scorer that it has already loaded.
        """
        return hashlib.sha256(msgpack.packb(self.packed, unicode_errors="surrogatepass")).hexdigest()[:16]


MATCH = ScorerSpec("match")


class Judged(Protocol):
    """The properties of a data set that rewards need."""

    @property
    def columns(self) -> Mapping[str, Kind]:
        """Name → kind of the columns of its rows."""

    @property
    def scorer(self) -> ScorerSpec | None:
        """The scorer for ``--reward task``; None if the data have none."""

    @property
    def sources(self) -> Mapping[str, DataShape]:
        """Source name → its columns and scorer, if there are several sources; empty for a single source."""


@dataclass(frozen=True)
class DataShape:
    """The facts about a data set that rewards need, without its records."""

    columns: Mapping[str, Kind]  # name → kind of the columns of its rows
    scorer: ScorerSpec | None  # scorer for ``--reward task``
    sources: Mapping[str, DataShape] = field(
        default_factory=dict
    )  # each of several sources by name; empty for one source
