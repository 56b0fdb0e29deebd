"""Predict which ranks of a pool read and store each node's rows.

In a run, this depends on how long responses turn out to be. The prediction takes all of them to have the same
length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rlflow.author.columns import Level
from rlflow.compiler.graph.model import Column, Input, Node, Op
from rlflow.compiler.plan import Plan
from rlflow.compiler.preview.sizes import Sizes

SPREAD = ("prompts", "rows", "groups")  # each row is on one rank, tokens are balanced over ranks


@dataclass(frozen=True)
class RowLayout:
    """Which ranks of a pool hold which rows."""

    pool: str  # name of the pool
    by: str  # ``prompts``, ``rows``, ``groups``, ``minibatch``, ``rank 0`` or ``all ranks``
    split: tuple[object, ...]  # two columns have equal splits if and only if their rows are on the same ranks
    of: str  # the node that the split was made for

    def __str__(self) -> str:
        return self.by if self.by.endswith(("0", "ranks")) else f"by {self.by}"


@dataclass
class Layouts:
    """The layouts of a plan's columns and nodes.

    Scalars don't have one, because they are sent along with each call.
    """

    plan: Plan  # the plan that these layouts belong to
    sizes: Sizes  # rows and bytes of the plan's columns
    needed: dict[int, RowLayout] = field(default_factory=dict)  # node id → layout of the rows that it reads
    columns: dict[Column, RowLayout] = field(default_factory=dict)  # column → layout of its rows
    bodies: dict[int, Layouts] = field(default_factory=dict)  # repeat's node id → layouts of its body

    @staticmethod
    def of(plan: Plan, sizes: Sizes, data: Mapping[str, RowLayout] | None = None) -> Layouts:
        """Predict the layouts of a plan.

        ``data``: column → layout, for columns from the data that are already stored, as in the body of a
        `repeat`.
        """
        layouts = Layouts(plan, sizes)
        for i in plan.live:
            layouts._add(plan.graph.nodes[i], data or {})
        return layouts

    def _add(self, node: Node, data: Mapping[str, RowLayout]) -> None:
        if node.op is Op.STATE:
            return
        if node.op is Op.REPEAT:
            self._add_repeat(node)
            return
        layout = (
            self._fresh(node, "groups" if self.plan.graph.axes[0].grouped else "prompts")
            if node.op is Op.DATA
            else self._need(node)
        )
        if node.op is not Op.DATA:
            self.needed[node.id] = layout
        for output in node.outputs:
            if output.kind is None or output.kind.level is not Level.SCALAR:
                self.columns[Column(node.id, output.name)] = data.get(output.name, layout)

    def _add_repeat(self, node: Node) -> None:
        """Add the layouts of a `repeat` and its body. Kept rows stay where the body stored them."""
        body = self.plan.bodies[node.id]
        inputs = {
            item.column.name: self.columns[item.column] for item in node.inputs if item.column in self.columns
        }
        inner = self.bodies[node.id] = Layouts.of(body, self.sizes.bodies[node.id], inputs)
        for item in body.graph.results:
            if item.column in inner.columns:
                self.columns[Column(node.id, item.parameter)] = inner.columns[item.column]

    def _need(self, node: Node) -> RowLayout:
        pool = self.plan.home[node.id]
        if node.op is Op.UPDATE:
            return RowLayout(pool, "minibatch", (pool, node.name), node.name)
        if node.op is Op.STAGE and node.dispatch != "DP_COMPUTE":
            # a dispatch mode that the author registered splits and merges rows on rank 0
            by = "all ranks" if node.dispatch == "ALL" else "rank 0"
            return RowLayout(pool, by, (pool, by), node.name)
        whole = node.op is Op.STAGE and node.rows == "group"
        home = self._home(node, pool)
        if home is not None and home.by in SPREAD and not (whole and home.by == "rows"):
            return home
        return self._fresh(node, "prompts" if node.op is Op.GENERATE else "groups" if whole else "rows")

    def _home(self, node: Node, pool: str) -> RowLayout | None:
        """Return the layout of the largest column the node reads from the pool, or None if it reads none."""
        here = [
            item
            for item in self._read(node)
            if item.column in self.columns and self.columns[item.column].pool == pool
        ]
        largest = max(here, key=lambda item: self.sizes.read(node, item), default=None)
        return None if largest is None else self.columns[largest.column]

    def _read(self, node: Node) -> tuple[Input, ...]:
        return tuple(
            item
            for item in node.inputs
            if node.op is not Op.GENERATE or item.parameter in ("prompt_tokens", "prefix_length")
        )

    def _fresh(self, node: Node, by: str) -> RowLayout:
        """Make a new layout on the node's pool that balances the rows by the lengths known to the node.

        Nodes that know the same lengths get equal layouts.
        """
        pool, columns = (
            self.plan.home[node.id],
            [output.name for output in node.outputs] if node.op is Op.DATA else [],
        )
        names = {*columns, *(item.parameter for item in self._read(node))}
        lengths = tuple(name for name in ("tokens", "prompt_tokens") if name in names) or self._first_ragged(
            node
        )
        return RowLayout(pool, by, (pool, node.axis, by == "groups", lengths), node.name)

    def _first_ragged(self, node: Node) -> tuple[str, ...]:
        for item in self._read(node):
            kind = self.plan.graph.nodes[item.column.node].output(item.column.name).kind
            if kind is not None and kind.level in (Level.TOKEN, Level.PROMPT):
                return ("tokens" if kind.level is Level.TOKEN else "prompt_tokens",)
        return ()


def alike(one: RowLayout, other: RowLayout) -> bool:
    """Return True if both layouts put rows on the same ranks."""
    return one.split == other.split


def on_one_rank(layouts: RowLayout, ranks: Mapping[str, int]) -> RowLayout:
    """If the pool has one rank, return a layout that equals all others on it; otherwise, the layout as is."""
    return replace(layouts, split=(layouts.pool,)) if ranks[layouts.pool] == 1 else layouts
