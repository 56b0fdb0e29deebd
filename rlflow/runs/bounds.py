"""Where a run's time went, and how fast the run could be.

This module computes each node's time and share, the critical path, how busy the queues were, and the shortest
time that any schedule could take.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlflow.compiler.spans import Span, chain, critical_path, divided, flat, longest_path

PATH = "the longest path"  # sets the bound, unless a queue has more work


@dataclass
class NodeTime:
    """One node's totals over a run, in seconds."""

    node: str
    seconds: float = 0.0  # its own time, not counting the nodes inside it
    # its share of the iterations' time, in seconds; nodes that run at the same time share that time equally
    part: float = 0.0
    critical: float = 0.0  # its time on critical paths
    calls: int = 0


@dataclass
class Path:
    """A critical path, and all iterations that had it."""

    nodes: dict[str, float]  # node → seconds on the path, in order
    iterations: int = 0
    seconds: float = 0.0  # total time of these iterations


@dataclass(frozen=True)
class TimeBounds:
    """The average iteration of a run. All times are in seconds."""

    iterations: int
    seconds: float
    path: float  # the longest path through the nodes
    work: Mapping[str, float]  # queue → total seconds of its nodes, divided by its slots
    # node → seconds on the most common critical path, in order
    critical: Mapping[str, float] = field(default_factory=dict)
    alike: int = 0  # number of iterations with this path
    outside: float = 0.0  # seconds before, between and after nodes

    @property
    def bound(self) -> float:
        """The shortest time per iteration that any schedule of these nodes could take, in seconds.

        This is the length of the longest path or the work of the busiest queue, whichever is larger.
        """
        return max(self.path, *self.work.values(), 0.0)

    @property
    def by(self) -> str:
        """What determines the bound: PATH, or the name of a queue."""
        lane = max(self.work, key=lambda lane: self.work[lane], default="")
        return lane if lane and self.work[lane] > self.path else PATH

    @property
    def busy(self) -> dict[str, float]:
        """The average share of each queue's slots that was in use."""
        return {lane: work / self.seconds if self.seconds else 0.0 for lane, work in self.work.items()}


class RunTotals:
    """Adds up the times of a run's iterations.

    ``room``: how many nodes each queue runs at once. ``staleness``: how many iterations may be in progress
    besides the current one. ``within``: node → the node that contains it (``Plan.within``).
    """

    def __init__(
        self,
        room: Mapping[str, int] | None = None,
        staleness: int = 0,
        within: Mapping[str, str] | None = None,
    ) -> None:
        self.shares: dict[str, NodeTime] = {}
        self.seconds, self.iterations = 0.0, 0
        self._room, self._under_way, self._within = room, staleness + 1, dict(within or {})
        self._work: dict[str, float] = dict.fromkeys(room or {}, 0.0)
        self._paths: dict[tuple[str, ...], Path] = {}
        self._path = 0.0

    def add(self, spans: Sequence[Span], start: float, seconds: float) -> None:
        """Add an iteration that began at ``start`` and took ``seconds``.

        ``spans``: when each node ran. Anything before ``start`` was done ahead of training and doesn't count
        as a delay.
        """
        self.iterations += 1
        self.seconds += seconds
        for span in spans:
            self._share(span.node).calls += 1
        own = flat(spans, self._within)
        self._path += longest_path(own)
        for span in own:
            self._share(span.node).seconds += span.seconds
            if span.lane in self._work:
                self._work[span.lane] += span.seconds / (self._room or {})[span.lane]
        for node, part in divided(own, start, start + seconds).items():
            self._share(node).part += part
        self._decided([span for span in critical_path(own, self._room) if span.end > start], start, seconds)

    def _share(self, node: str) -> NodeTime:
        return self.shares.setdefault(node, NodeTime(node))

    def _decided(self, path: Sequence[Span], start: float, seconds: float) -> None:
        """Count an iteration under its critical path.

        A node that contains other nodes appears on the path only once, in its last position, with all its
        time on the path.
        """
        on_path: dict[str, float] = {}
        for span in path:
            on_path[span.node] = on_path.get(span.node, 0.0) + span.end - max(span.start, start)
        for node, own in on_path.items():
            self._share(node).critical += own
        last = {span.node: place for place, span in enumerate(path)}
        holders = set(self._within.values())
        nodes = chain(
            span.node
            for place, span in enumerate(path)
            if span.node not in holders or last[span.node] == place
        )
        alike = self._paths.setdefault(tuple(nodes), Path(dict.fromkeys(nodes, 0.0)))
        alike.iterations += 1
        alike.seconds += seconds
        for node in nodes:
            alike.nodes[node] += on_path[node]

    def __iter__(self) -> Iterator[NodeTime]:
        return iter(sorted(self.shares.values(), key=lambda share: -share.seconds))

    @property
    def bounds(self) -> TimeBounds:
        """The average over all iterations, and the most common critical path."""
        each = 1 / max(self.iterations, 1)
        most = max(self._paths.values(), key=lambda path: (path.iterations, path.seconds), default=Path({}))
        critical = {node: seconds / most.iterations for node, seconds in most.nodes.items()}
        outside = max(most.seconds / max(most.iterations, 1) - sum(critical.values()), 0.0)
        return TimeBounds(
            self.iterations,
            self.seconds * each,
            self._path * each / self._under_way,
            {lane: work * each for lane, work in self._work.items()},
            critical,
            most.iterations,
            outside,
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values under the stable keys described in docs/runs.md."""
        bounds = self.bounds
        return asdict(bounds) | {
            "critical": [{"node": node, "seconds": seconds} for node, seconds in bounds.critical.items()],
            "bound": bounds.bound,
            "bounded_by": "path" if bounds.by == PATH else bounds.by,
            "busy": bounds.busy,
            "nodes": {
                share.node: {
                    "calls": share.calls,
                    "seconds": share.seconds,
                    "part": share.part,
                    "critical": share.critical,
                }
                for share in self
            },
        }
