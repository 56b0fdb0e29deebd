"""Describes the scorer of rows as plain data, so that a process can build it without the data set."""

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
    """Describes a row scorer, so that any process can build it."""

    kind: str  # match, math, reasoning_gym or function
    reads: tuple[str, ...] = ("completion", "answer")  # row columns that it requires
    optional: tuple[str, ...] = ()  # row columns that it uses if a batch has them
    # arguments for this kind of scorer, as plain values
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def packed(self) -> dict[str, Any]:
        """Return the kind and settings as plain values, which a worker process needs to build the scorer."""
        return {"kind": self.kind, "settings": dict(self.settings)}

    @cached_property
    def key(self) -> str:
        """16 hex digits of a SHA-256 over kind and settings.

        A worker process uses this key to recognize scorers that it has already loaded.
        """
        return hashlib.sha256(msgpack.packb(self.packed, unicode_errors="surrogatepass")).hexdigest()[:16]


MATCH = ScorerSpec("match")


class Judged(Protocol):
    """What rewards need to know about a data set."""

    @property
    def columns(self) -> Mapping[str, Kind]:
        """The kind of each column of the data set's rows, by name."""

    @property
    def scorer(self) -> ScorerSpec | None:
        """The scorer for ``--reward task``, or None if the data has none."""

    @property
    def sources(self) -> Mapping[str, DataShape]:
        """The columns and scorer of each source, by source name. Empty if there is only one source."""


@dataclass(frozen=True)
class DataShape:
    """What rewards need to know about a data set, without its records."""

    columns: Mapping[str, Kind]  # name → kind of the columns of its rows
    scorer: ScorerSpec | None  # scorer for ``--reward task``
    sources: Mapping[str, DataShape] = field(
        default_factory=dict
    )  # each of several sources by name; empty for one source
