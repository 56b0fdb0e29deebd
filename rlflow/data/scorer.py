"""The data set's own scorer, as plain data: a process that has none of the data can rebuild it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import msgpack

if TYPE_CHECKING:
    from rlflow.columns import Kind


@dataclass(frozen=True)
class ScorerSpec:
    """What judges a row. kind: how (match, math, reasoning_gym, function); reads: the row columns it needs; optional: those it
    takes where they are there; settings: all else, of plain values."""

    kind: str
    reads: tuple[str, ...] = ("completion", "answer")
    optional: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def packed(self) -> dict[str, Any]:
        return {"kind": self.kind, "settings": dict(self.settings)}

    @cached_property
    def key(self) -> str:
        """A digest of kind and settings: a process loads each scorer once."""
        return hashlib.sha256(msgpack.packb(self.packed, unicode_errors="surrogatepass")).hexdigest()[:16]


MATCH = ScorerSpec("match")


class Judged(Protocol):
    """What rewards need to know of a data set: its columns, and its own scorer."""

    @property
    def columns(self) -> Mapping[str, Kind]: ...

    @property
    def scorer(self) -> ScorerSpec | None: ...
