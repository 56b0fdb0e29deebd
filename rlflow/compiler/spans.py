"""Spans: when each node ran, in real or simulated time.

Also the chain of nodes that determined the end of an iteration.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Span:
    """The start and the end of a node's run, in seconds of a monotonic clock."""

    node: str  # name of the node
    lane: str  # its executor queue
    start: float
    end: float
    waits_for: tuple[str, ...] = ()  # names of the nodes whose results it read

    @property
    def seconds(self) -> float:
        """The seconds from start to end."""
        return self.end - self.start


@dataclass(frozen=True)
class RankSpan:
    """The start and the end of an operation that a rank of a pool ran for a node.

    The clock is that of ``Span``.
    """

    node: str  # name of the node
    pool: str
    rank: int  # rank within the pool
    start: float
    end: float
    iteration: int = 0  # iteration of the run
    op: str = ""  # name of the operation


TICK = 1e-9  # tolerance for clocks and sums of seconds


def critical_path(spans: Sequence[Span], room: Mapping[str, int] | None = None) -> list[Span]:
    """Return the chain of spans that determined the end of the iteration, first span first.

    The search starts at the span that ended last. Each step goes back to the span that the current span
    waited for longest, to get its columns or a place in a queue. ``room``: queue → how many nodes it runs at
    once; a queue without an entry delays nothing. If ``room`` is None, each queue runs one node at a time.
    """
    ended = _Ended(spans, room)
    path: dict[Span, None] = {}
    more = [last] if (last := max(spans, key=lambda span: span.end, default=None)) is not None else []
    while more:
        path |= dict.fromkeys(more)
        more = ended.before(more[-1], path)
    return [*path][::-1]


class _Ended:
    """The spans of each node and of each queue, sorted by their end.

    If several spans ended at the same time, the first of them in the input counts as the last to end.
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
        """Return the spans from ``span`` back to the span that it waited for longest.

        The list is empty if ``span`` waited for no span. ``path``: the spans of the path so far, which are excluded.
        The last span of the result ended last among all spans that ``span`` waited for. The spans between
        them have zero length and began and ended just as ``span`` began.
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

        For each node on which ``span`` waited, and for its queue, these are the spans that ended when
        ``span`` began, and the last one to end earlier.
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
        """Yield (end, key) of the spans in the same queue at whose end the queue was full."""
        limit = 1 if self._room is None else self._room.get(span.lane, 0)
        for end in self._backwards(("lane", span.lane), span.start, path) if limit else ():
            if limit == 1 or self._running_at_end(self._spans[-end[1]]) >= limit:
                yield end

    def _running_at_end(self, one: Span) -> int:
        """Count the spans of the queue that ran just before ``one`` ended, including ``one``."""
        return sum(
            s is one or (s.start < one.end - TICK and s.end >= one.end - TICK)
            for s in self._spans
            if s.lane == one.lane
        )


def chain(names: Iterable[str]) -> list[str]:
    """Return the names along a path without its loops.

    If a name occurs again, the names after its first occurrence are removed. So each name still follows the
    name of a node that it waited for.
    """
    path: list[str] = []
    for name in names:
        del path[path.index(name) + 1 if name in path else len(path) :]
        path += [] if name in path else [name]
    return path


def flat(spans: Sequence[Span], within: Mapping[str, str]) -> list[Span]:
    """Return spans without overlaps of nested spans, so that no time counts twice.

    ``within``: node → its holder, the node in which it runs, such as a `repeat`. A holder keeps the time
    before, between and after its inner nodes. The first inner node then waits for the holder, and each later
    part of the holder waits for the inner nodes that ran before it.
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
    """Yield the `repeat` around the node, the `repeat` around that `repeat`, and so on."""
    while node in within:
        yield (node := within[node])


def _inside(span: Span, holder: Span) -> bool:
    return holder.start - TICK <= span.start and span.end <= holder.end + TICK


def _rest(holder: Span, inner: Sequence[Span]) -> Iterator[Span]:
    """Yield the parts of a holder's span during which none of the spans ``inner`` ran.

    There is a part before the first inner span, one after the last, and one in each gap between them, even if
    it has no length.
    """
    since, waits = holder.start, holder.waits_for
    names = tuple(dict.fromkeys((*holder.waits_for, *(span.node for span in inner))))
    for start, end in _covered(inner):
        yield replace(holder, start=since, end=max(start, since), waits_for=waits)
        since, waits = end, names
    yield replace(holder, start=since, end=max(holder.end, since), waits_for=waits)


def _covered(spans: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """Yield the maximal periods (start, end) during which some span ran.

    Periods that only touch each other stay separate.
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
    """Return node → its share of the seconds between ``start`` and ``end``.

    If several nodes ran at the same time, each gets an equal share of that time.
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

    More workers cannot make an iteration shorter than this. If a node ran several times, as in the tries of a
    `repeat`, its runs count one after another.
    """
    done: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        before = max((done.get(name, 0.0) for name in (*span.waits_for, span.node)), default=0.0)
        done[span.node] = before + span.seconds
    return max(done.values(), default=0.0)


def busy(spans: Sequence[Span], seconds: float, room: Mapping[str, int]) -> dict[str, float]:
    """Return queue → the share of its places that was in use, averaged over ``seconds``.

    Queues that ran nothing are absent. A queue without a limit counts as one place, so its share may exceed
    1.
    """
    work: dict[str, float] = {}
    for span in spans:
        work[span.lane] = work.get(span.lane, 0.0) + span.seconds
    return {
        lane: seconds_taken / (room.get(lane, 1) * seconds) if seconds else 0.0
        for lane, seconds_taken in sorted(work.items())
    }
