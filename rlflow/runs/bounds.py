"""What bounded a run: per node its time and share, and how much of it lay on the critical path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlflow.execution.executor import Span


@dataclass
class Share:
    """Totals of one node over a run, in seconds."""

    node: str
    seconds: float = 0.0
    critical: float = 0.0
    calls: int = 0


def critical_path(spans: Sequence[Span]) -> list[Span]:
    """The chain of nodes that decided when the iteration ended, first node first: from the node that ended last, back each time to
    the node that it waited for longest, be it for its columns or for its lane."""
    path: list[Span] = []
    current = max(spans, key=lambda span: span.end, default=None)
    while current is not None:
        path.append(current)
        node = current
        before = [s for s in spans if s.end <= node.start + 1e-9 and (s.node in node.waits_for or s.lane == node.lane) and s not in path]
        current = max(before, key=lambda span: span.end, default=None)
    return path[::-1]


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
            share.seconds += span.end - span.start
            share.calls += 1
            share.critical += (span.end - span.start) if id(span) in critical else 0.0

    def __iter__(self) -> Iterator[Share]:
        return iter(sorted(self.shares.values(), key=lambda share: -share.seconds))
