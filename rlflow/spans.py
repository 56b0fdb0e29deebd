"""When nodes ran, really or in virtual time, and the chain of them that decided the end."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """When a node ran, in seconds of a monotonic clock, and in which lane."""

    node: str
    lane: str
    start: float
    end: float
    waits_for: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class RankSpan:
    """When a rank of a pool carried out an operation for a node of an iteration, by the same clock."""

    node: str
    pool: str
    rank: int
    start: float
    end: float
    iteration: int = 0
    op: str = ""


TICK = 1e-9  # what clocks and sums of seconds may differ by


def critical_path(spans: Sequence[Span]) -> list[Span]:
    """The chain of nodes that decided when the iteration ended, first node first: from the node that ended last, back each time to
    the node that it waited for longest, be it for its columns or for its lane."""
    ended = _Ended(spans)
    path: dict[Span, None] = {}
    current = max(spans, key=lambda span: span.end, default=None)
    while current is not None:
        path[current] = None
        current = ended.last_before(current, path)
    return [*path][::-1]


class _Ended:
    """Spans of each node and of each lane by when they ended; of those that ended at once the first given counts as the last."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans
        self._of: dict[tuple[str, str], list[tuple[float, int]]] = {}
        for rank, span in enumerate(spans):
            for key in (("node", span.node), ("lane", span.lane)):
                self._of.setdefault(key, []).append((span.end, -rank))
        for ends in self._of.values():
            ends.sort()

    def last_before(self, span: Span, path: Mapping[Span, None]) -> Span | None:
        """What ended last of all that the span waited for and that is not on the path yet."""
        keys = (*(("node", name) for name in span.waits_for), ("lane", span.lane))
        found = (self._backwards(key, span.start, path) for key in keys)
        last = max((first for ends in found if (first := next(ends, None)) is not None), default=None)
        return None if last is None else self._spans[-last[1]]

    def _backwards(self, key: tuple[str, str], start: float, path: Mapping[Span, None]) -> Iterator[tuple[float, int]]:
        ends = self._of.get(key, [])
        for place in reversed(range(bisect_right(ends, (start + TICK, 0)))):
            if self._spans[-ends[place][1]] not in path:
                yield ends[place]


def longest_path(spans: Iterable[Span]) -> float:
    """Seconds of the longest chain in which each node waits for the one before it for its columns: no number of workers makes an
    iteration shorter. A node that ran several times followed itself, as the tries of a `repeat` do."""
    done: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        before = max((done.get(name, 0.0) for name in (*span.waits_for, span.node)), default=0.0)
        done[span.node] = before + span.seconds
    return max(done.values(), default=0.0)


def busy(spans: Sequence[Span], seconds: float, room: Mapping[str, int]) -> dict[str, float]:
    """For each lane that ran something the share of its room that was taken over ``seconds``; a lane without a limit counts as one
    place, so its share may exceed 1."""
    work: dict[str, float] = {}
    for span in spans:
        work[span.lane] = work.get(span.lane, 0.0) + span.seconds
    return {lane: taken / (room.get(lane, 1) * seconds) if seconds else 0.0 for lane, taken in sorted(work.items())}
