"""Follow a reward's scores through the graph, up to the updates whose gradient they change.

Scores pass through columns, the choice of rows, follow-up prompts, state, and weights trained with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow.compiler.graph.model import Column, Graph, Node, Op
from rlflow.errors import Place


@dataclass(frozen=True)
class PathStep:
    """A step on the path of a reward's scores: what carries them, and where in the file."""

    what: str
    place: Place | None
    before: PathStep | None = None

    @property
    def steps(self) -> int:
        """The length of the path from the reward to here."""
        return 1 + (self.before.steps if self.before else 0)

    def __str__(self) -> str:
        here = f"{self.what} ({self.place})" if self.place else self.what
        return f"{self.before} → {here}" if self.before else here


@dataclass(frozen=True)
class ReachedUpdate:
    """An update whose columns or rows depend on a reward's scores.

    ``columns`` maps each parameter whose column depends on the scores to the path they took. ``rows`` is
    their path to the choice of rows, or None if that doesn't depend on the scores.
    """

    node: Node
    columns: Mapping[str, PathStep]
    rows: PathStep | None


@dataclass
class Carried:
    """What depends on the scores in a graph: its columns, and row axes whose very rows do."""

    columns: dict[Column, PathStep] = field(default_factory=dict)
    rows: dict[int, PathStep] = field(default_factory=dict)


class Reach:
    """Finds everything in a graph that depends on the scores of one reward call.

    The call may be inside a `repeat`. The graph is searched over and over until nothing new is found.
    """

    def __init__(self, graph: Graph, reward: Node, influences: Mapping[str, frozenset[str]]) -> None:
        """Search the graph.

        ``influences`` maps an update's name to the parameters whose columns change its gradient.
        """
        self.reward, self.influences = reward, influences
        self.weights: dict[str, PathStep] = {}
        self.state: dict[str, PathStep] = {}
        self.targets: dict[str, ReachedUpdate] = {}
        self.reached: dict[str, PathStep] = {}  # updates whose gradient depends on the scores
        self.furthest = PathStep(f"{reward.name} gives {reward.outputs[0].name}", reward.place)
        known = -1
        while known != (known := len(self.weights) + len(self.state) + len(self.reached)):
            top = self.follow(graph, Carried())
            for slot in graph.state:
                if step := top.columns.get(slot.final):
                    self.state.setdefault(slot.name, step)

    def follow(self, graph: Graph, carried: Carried) -> Carried:
        """Visit the nodes in program order, adding everything that depends on the scores to ``carried``."""
        for node in graph.nodes:
            self._visit(graph, node, carried)
        return carried

    def _visit(self, graph: Graph, node: Node, carried: Carried) -> None:
        cause = self._cause(graph, node, carried)
        if node.op is Op.STATE:
            for output in node.outputs:
                if step := self.state.get(output.name):
                    carried.columns[Column(node.id, output.name)] = self._extend(
                        f"state {output.name}", None, step
                    )
        elif node.op is Op.UPDATE:
            self._update(node, carried)
        elif node.op is Op.CONCAT:
            self._concat(graph, node, carried)
        elif node.body is not None:
            self._repeat(node, node.body, carried)
        elif node.op is Op.REWARD and node.name == self.reward.name:
            self._give(node, PathStep(f"{node.name} gives {node.outputs[0].name}", node.place), carried)
        elif cause is not None and node.op is not Op.DATA:
            names = ", ".join(output.name for output in node.outputs)
            self._give(
                node,
                self._extend(f"{node.name} gives {names}" if names else node.name, node.place, cause),
                carried,
            )
            if node.makes is not None:
                carried.rows.setdefault(node.makes, self._extend(f"rows of {node.name}", node.place, cause))

    def _cause(self, graph: Graph, node: Node, carried: Carried) -> PathStep | None:
        read = (carried.columns.get(item.column) for item in node.inputs)
        causes = [*read, carried.rows.get(node.axis), self.weights.get(node.role or "")]
        return next((step for step in causes if step is not None), None)

    def _extend(self, what: str, place: Place | None, before: PathStep) -> PathStep:
        step = PathStep(what, place, before)
        if step.steps > self.furthest.steps:
            self.furthest = step
        return step

    def _give(self, node: Node, step: PathStep, carried: Carried) -> None:
        for output in node.outputs:
            carried.columns.setdefault(Column(node.id, output.name), step)

    def _concat(self, graph: Graph, node: Node, carried: Carried) -> None:
        """Follow the scores through a `concat`: what is joined depends on them if any of its parts does."""
        for item in node.inputs:
            if step := carried.columns.get(item.column):
                carried.columns.setdefault(Column(node.id, item.parameter.partition(".")[2]), step)
        assert node.makes is not None
        for part in graph.axes[node.makes].parts:
            if step := carried.rows.get(part):
                carried.rows.setdefault(node.makes, step)

    def _repeat(self, node: Node, body: Graph, carried: Carried) -> None:
        """Follow the scores through the body of a `repeat`.

        The node's inputs are the body's data. Its outputs depend on the scores if the body's results do, or
        if the scores decide which groups are kept.
        """
        data = body.nodes[0]
        inner = Carried(
            {
                Column(data.id, item.parameter): step
                for item in node.inputs
                if (step := carried.columns.get(item.column))
            }
        )
        self.follow(body, inner)
        for item in body.results:
            if step := inner.columns.get(item.column):
                carried.columns.setdefault(Column(node.id, item.parameter), step)
                if item.parameter == "keep":
                    carried.rows[node.rows_axis] = self._extend(
                        f"groups that {node.name} keeps", node.place, step
                    )
        if step := inner.rows.get(body.rows):
            carried.rows.setdefault(node.rows_axis, step)

    def _update(self, node: Node, carried: Carried) -> None:
        columns = {item.parameter: step for item in node.inputs if (step := carried.columns.get(item.column))}
        rows = carried.rows.get(node.axis)
        if not columns and rows is None:
            return
        self.targets[node.name] = ReachedUpdate(node, columns, rows)
        step = rows or next(
            (step for name, step in columns.items() if name in self.influences[node.name]), None
        )
        if step is not None and node.name not in self.reached:
            self.reached[node.name] = step
            self.weights.setdefault(node.role or "", PathStep(f"weights of {node.role}", node.place, step))
