"""What bounded a run: per node its time and share, what the critical path was made of, how busy lanes were, and how far all that is from
what no schedule can beat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlflow.spans import Span, critical_path, longest_path

PATH = "the longest path"  # what bounds where no lane has more work


@dataclass
class Share:
    """Totals of one node over a run, in seconds; of its calls on critical paths how many, and how long after their iterations' starts."""

    node: str
    seconds: float = 0.0
    critical: float = 0.0
    calls: int = 0
    decided: int = 0
    after: float = 0.0

    @property
    def place(self) -> float:
        """Where on the critical path it is, on average."""
        return self.after / max(self.decided, 1)


@dataclass(frozen=True)
class Bounds:
    """An iteration of a run, in seconds, all means. ``critical``: nodes of the critical path in its order, each with the time for which
    it was on it. ``work``: of each lane its nodes' seconds over its room."""

    iterations: int
    seconds: float
    path: float
    work: Mapping[str, float]
    critical: Mapping[str, float]

    @property
    def bound(self) -> float:
        """What no schedule of these nodes can beat: the longest path, or the work of the busiest lane."""
        return max(self.path, *self.work.values(), 0.0)

    @property
    def by(self) -> str:
        """What that is."""
        lane = max(self.work, key=lambda lane: self.work[lane], default="")
        return lane if lane and self.work[lane] > self.path else PATH

    @property
    def busy(self) -> dict[str, float]:
        """Of each lane the share of its room that was taken."""
        return {lane: work / self.seconds if self.seconds else 0.0 for lane, work in self.work.items()}

    @property
    def outside(self) -> float:
        """Seconds in which no node of the critical path ran: between nodes, before them and after."""
        return max(self.seconds - sum(self.critical.values()), 0.0)


class Totals:
    """Adds up iterations. ``room``: how many nodes each lane runs at once; ``staleness``: how many more iterations are under way beside
    the one that trains."""

    def __init__(self, room: Mapping[str, int] | None = None, staleness: int = 0) -> None:
        self.shares: dict[str, Share] = {}
        self.seconds, self.iterations = 0.0, 0
        self._room, self._under_way = dict(room or {}), staleness + 1
        self._work: dict[str, float] = dict.fromkeys(self._room, 0.0)
        self._path = 0.0

    def add(self, spans: Sequence[Span], start: float, seconds: float) -> None:
        """An iteration that began at ``start`` and took ``seconds``. What ran before, ahead of it, kept nothing waiting."""
        self.iterations += 1
        self.seconds += seconds
        self._path += longest_path(spans)
        critical = {id(span) for span in critical_path(spans)}
        for span in spans:
            share = self.shares.setdefault(span.node, Share(span.node))
            share.seconds += span.seconds
            share.calls += 1
            if span.lane in self._work:
                self._work[span.lane] += span.seconds / self._room[span.lane]
            if id(span) in critical and span.end > start:
                share.critical += span.end - max(span.start, start)
                share.decided += 1
                share.after += max(span.start - start, 0.0)

    def __iter__(self) -> Iterator[Share]:
        return iter(sorted(self.shares.values(), key=lambda share: -share.seconds))

    @property
    def bounds(self) -> Bounds:
        each = 1 / max(self.iterations, 1)
        path = sorted((share for share in self.shares.values() if share.decided), key=lambda share: share.place)
        return Bounds(self.iterations, self.seconds * each, self._path * each / self._under_way,
                      {lane: work * each for lane, work in self._work.items()}, {share.node: share.critical * each for share in path})

    def as_json(self) -> dict[str, Any]:
        """Plain values under stable keys; docs/runs.md says what each is."""
        found = self.bounds
        return asdict(found) | {
            "critical": [{"node": node, "seconds": seconds} for node, seconds in found.critical.items()],
            "bound": found.bound, "bounded_by": "path" if found.by == PATH else found.by, "busy": found.busy, "outside": found.outside,
            "nodes": {share.node: {"calls": share.calls, "seconds": share.seconds, "critical": share.critical} for share in self},
        }
