"""Verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlflow.bench.journal import Measured
from rlflow.bench.suite import Suite


@dataclass(frozen=True)
class Verdict:
    """A sentence on what the numbers say of a cell beside the base."""

    cell: str
    base: str
    what: str  # that is compared
    text: str


def verdicts(suite: Suite, cells: Sequence[tuple[str, Measured]]) -> list[Verdict]:
    """Verdicts."""
    return []


def decided(suite: Suite, cells: Sequence[tuple[str, Measured]]) -> bool:
    """Decided."""
    return False
