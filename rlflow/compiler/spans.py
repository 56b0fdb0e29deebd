"""Spans: when each node ran, in real or simulated time. Also finds what made an iteration take so long."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Span:
    """When a node's run started and ended, in seconds of a monotonic clock."""

    node: str  # name of the node
    lane: str  # its executor queue
    start: float
    end: float
    waits_for: tuple[str, ...] = ()  # names of the nodes whose results it read

    @property
    def seconds(self) -> float:
        """How many seconds the run took."""
        return self.end - self.start


@dataclass(frozen=True)
class RankSpan:
    """When a rank of a pool started and ended an operation for a node, on the same clock as ``Span``."""

    node: str  # name of the node
    pool: str
    rank: int  # rank within the pool
    start: float
    end: float
    iteration: int = 0  # iteration of the run
    op: str = ""  # name of the operation


TICK = 1e-9  # tolerance for clocks and sums of seconds


def critical_path(spans: Sequence[Span], room: Mapping[str, int] | None = None) -> list[Span]:
    """Return the chain of spans that determined when the iteration ended, in order.

    The search begins at the span that ended last, and keeps going back to the one that the current span
    waited for longest, to get its columns or a place in a queue. ``room``: how many nodes each queue can run
    at once, where queues that aren't listed never cause delays. If it is None, each queue runs one node at a
    time.
    """
    ended = _Ended(spans, room)
    path: dict[Span, None] = {}
    more = [last] if (last := max(spans, key=lambda span: span.end, default=None)) is not None else []
    while more:
        path |= dict.fromkeys(more)
        more = ended.before(more[-1], path)
    return [*path][::-1]


class _Ended:
    """The spans of each node and of each queue, sorted by when they ended.

    Of spans that ended together, the first one in the input counts as the last to end.
    """

    def __init__(self, spans: Sequence[Span], room: Mapping[str, int] | None) -> None:
        self._spans, self._room = spans, room
        self._of: dict[tuple[str, str], list[tuple[float, int]]] = {}
        for rank, span in enumerate(spans):
            for key in (("node", span.node), ("lane", span.lane)):
                self._of.setdefault(key, []).append((span.end, -rank))
        for ends in self._of.values():
            ends.sort()

    def before(self, span: Span, path: Mapping[Span, None]) -> list[Span]:
        """Return the spans from ``span`` back to the one that it waited for longest.

        ``path`` has the spans found so far, which are excluded. The last span of the result ended last among
        those that ``span`` waited for; any in between have no length, and began and ended just as ``span``
        began. If ``span`` waited for nothing, the list is empty.
        """
        steps: dict[Span, list[Span]] = {span: []}
        ends: dict[Span, tuple[float, int]] = {}
        at_once = [span]
        for one in at_once:
            for end in self._candidates(one, path):
                if (other := self._spans[-end[1]]) not in steps:
                    steps[other], ends[other] = [*steps[one], other], end
                    at_once += [other] if other.start >= span.start - TICK else []

        def rank(other: Span) -> tuple[bool, bool, int, tuple[float, int]]:
            until_then, at_once = other.end >= span.start - TICK, other.start >= span.start - TICK
            return until_then, not at_once, -len(steps[other]), ends[other]

        return steps[max(ends, key=rank)] if ends else []

    def _candidates(self, span: Span, path: Mapping[Span, None]) -> Iterator[tuple[float, int]]:
        """Yield (end, key) of the spans that ``span`` may have waited for, latest first.

        For each node that ``span`` waited for, and for its queue, these are the spans that ended just as it
        began, and the last one that ended earlier.
        """
        for ends in (
            *(self._backwards(("node", name), span.start, path) for name in span.waits_for),
            self._full(span, path),
        ):
            for end in ends:
                yield end
                if end[0] < span.start - TICK:
                    break

    def _backwards(
        self, key: tuple[str, str], start: float, path: Mapping[Span, None]
    ) -> Iterator[tuple[float, int]]:
        ends = self._of.get(key, [])
        for place in reversed(range(bisect_right(ends, (start + TICK, 0)))):
            if self._spans[-ends[place][1]] not in path:
                yield ends[place]

    def _full(self, span: Span, path: Mapping[Span, None]) -> Iterator[tuple[float, int]]:
        """Yield (end, key) of spans in the same queue that ended while the queue was full."""
        limit = 1 if self._room is None else self._room.get(span.lane, 0)
        for end in self._backwards(("lane", span.lane), span.start, path) if limit else ():
            if limit == 1 or self._running_at_end(self._spans[-end[1]]) >= limit:
                yield end

    def _running_at_end(self, one: Span) -> int:
        """Count the queue's spans that were running just before ``one`` ended, including ``one``."""
        return sum(
            s is one or (s.start < one.end - TICK and s.end >= one.end - TICK)
            for s in self._spans
            if s.lane == one.lane
        )


def chain(names: Iterable[str]) -> list[str]:
    """Return the names along a path, with loops removed.

    When a name comes up again, those after its first occurrence are dropped. That way, each name still
    follows that of a node it waited for.
    """
    path: list[str] = []
    for name in names:
        del path[path.index(name) + 1 if name in path else len(path) :]
        path += [] if name in path else [name]
    return path


def flat(spans: Sequence[Span], within: Mapping[str, str]) -> list[Span]:
    """Cut nested spans so that they don't overlap and no time counts twice.

    ``within`` maps a node to the node that it runs in, its holder, such as a `repeat`. A holder keeps the
    time before, between and after its inner nodes. The first inner node then waits for the holder, and each
    later part of the holder waits for the inner nodes that ran before it.
    """
    parts, holders = list(spans), set(within.values())
    # inner holders first
    for holder in sorted((span for span in spans if span.node in holders), key=lambda span: span.seconds):
        inner = {
            id(span): span
            for span in parts
            if holder.node in _holders(span.node, within) and _inside(span, holder)
        }
        if inner:
            names = {span.node for span in inner.values()}
            parts = [span for span in parts if span is not holder and id(span) not in inner]
            parts += [
                span
                if names.intersection(span.waits_for)
                else replace(span, waits_for=(*span.waits_for, holder.node))
                for span in inner.values()
            ]
            parts += _rest(holder, list(inner.values()))
    return parts


def _holders(node: str, within: Mapping[str, str]) -> Iterator[str]:
    """Yield the `repeat` around the node, the `repeat` around that one, and so on."""
    while node in within:
        yield (node := within[node])


def _inside(span: Span, holder: Span) -> bool:
    return holder.start - TICK <= span.start and span.end <= holder.end + TICK


def _rest(holder: Span, inner: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of a holder's span in which none of the ``inner`` spans ran.

    These are before the first inner span, after the last, and in each gap in between, even if they have no
    length.
    """
    since, waits = holder.start, holder.waits_for
    names = tuple(dict.fromkeys((*holder.waits_for, *(span.node for span in inner))))
    for start, end in _covered(inner):
        yield replace(holder, start=since, end=max(start, since), waits_for=waits)
        since, waits = end, names
    yield replace(holder, start=since, end=max(holder.end, since), waits_for=waits)


def _covered(spans: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """Yield the longest periods (start, end) in which there was always a span running.

    Periods that only touch stay separate.
    """
    ordered = sorted((span.start, span.end) for span in spans)
    start, end = ordered[0]
    for first, last in ordered[1:]:
        if first >= end:
            yield start, end
            start = first
        end = max(end, last)
    yield start, end


def divided(spans: Iterable[Span], start: float, end: float) -> dict[str, float]:
    """Split the seconds between ``start`` and ``end`` among the nodes, returning each node's share.

    Nodes that ran at the same time share that time equally.
    """
    clipped = [(max(span.start, start), min(span.end, end), span.node) for span in spans]
    events = sorted(
        [(first, 1, node) for first, last, node in clipped if first < last]
        + [(last, -1, node) for first, last, node in clipped if first < last]
    )
    parts: dict[str, float] = {}
    running: dict[str, int] = {}
    since = start
    for moment, change, node in events:
        count = sum(running.values())
        for name, times in running.items():
            parts[name] = parts.get(name, 0.0) + (moment - since) * times / count
        since = moment
        running[node] = running.get(node, 0) + change
        if not running[node]:
            del running[node]
    return parts


def longest_path(spans: Iterable[Span]) -> float:
    """Return the seconds of the longest chain of nodes in which each waits for columns of the one before.

    No number of workers can make an iteration shorter than this. If a node ran several times, as in the tries
    of a `repeat`, its runs are added up.
    """
    done: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        before = max((done.get(name, 0.0) for name in (*span.waits_for, span.node)), default=0.0)
        done[span.node] = before + span.seconds
    return max(done.values(), default=0.0)


def busy(spans: Sequence[Span], seconds: float, room: Mapping[str, int]) -> dict[str, float]:
    """For each queue, return the share of its places in use, averaged over ``seconds``.

    Queues that ran nothing aren't listed. A queue without a limit counts as a single place, so its share can
    exceed 1.
    """
    work: dict[str, float] = {}
    for span in spans:
        work[span.lane] = work.get(span.lane, 0.0) + span.seconds
    return {
        lane: seconds_taken / (room.get(lane, 1) * seconds) if seconds else 0.0
        for lane, seconds_taken in sorted(work.items())
    }
