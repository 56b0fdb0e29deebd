"""What bounded a run: per node its time and share, and how much of it lay on the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlflow.spans import Span, critical_path


@dataclass
class Share:
    """Totals of one node over a run, in seconds."""

    node: str
    seconds: float = 0.0
    critical: float = 0.0
    calls: int = 0


class Totals:
    """Adds up iterations."""

    def __init__(self) -> None:
        self.shares: dict[str, Share] = {}
        self.seconds = 0.0

    def add(self, spans: Sequence[Span], seconds: float) -> None:
        self.seconds += seconds
        critical = {id(span) for span in critical_path(spans)}
        for span in spans:
            share = self.shares.setdefault(span.node, Share(span.node))
            share.seconds += span.seconds
            share.calls += 1
            share.critical += span.seconds if id(span) in critical else 0.0

    def __iter__(self) -> Iterator[Share]:
        return iter(sorted(self.shares.values(), key=lambda share: -share.seconds))
