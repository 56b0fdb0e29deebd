"""How many rows and bytes the columns of an iteration are expected to have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rlflow.columns import Kind, Level
from rlflow.graph.model import Column, Graph, Input, Node, Op
from rlflow.placement import SIZES, TYPICAL

LETTERS = 4  # bytes of text per token
OTHER_TEXT = 32  # bytes of a text that is neither prompt nor completion, such as an answer


@dataclass(frozen=True)
class Assumed:
    """What nothing but a run can tell. prompts: those of an iteration; prompt_tokens: of each; response_tokens: of responses that come
    with the data. Sampled responses count as long as their max_tokens."""

    prompts: int
    prompt_tokens: int = TYPICAL[Level.PROMPT]
    response_tokens: int = TYPICAL[Level.TOKEN]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one graph; ``bodies`` those of its repeats, by node id."""

    graph: Graph
    assumed: Assumed
    bodies: Mapping[int, Sizes] = field(default_factory=dict)

    @staticmethod
    def of(graph: Graph, assumed: Assumed) -> Sizes:
        """The sizes of a graph's columns, of the bodies of repeats too."""
        return Sizes(graph, assumed, {node.id: Sizes.of(node.body, assumed) for node in graph.nodes if node.body})

    @cached_property
    def rows(self) -> dict[int, int]:
        """Rows of each axis. A `repeat` counts as one that keeps all the groups that it wants."""
        rows_of: dict[int, int] = {}
        repeats = {node.makes: node for node in self.graph.nodes if node.op is Op.REPEAT}
        for number, axis in enumerate(self.graph.axes):
            if number in repeats:
                rows_of[number] = setting(repeats[number], "groups") * max(axis.samples, 1)
            elif axis.parent is None:
                rows_of[number] = self.assumed.prompts * (2 if axis.grouped else 1)  # data of pairs: two rows a record
            else:
                rows_of[number] = rows_of[axis.parent] * max(axis.samples, 1)
        return rows_of

    @cached_property
    def groups(self) -> dict[int, int]:
        """Units that a stage over groups, or a generator, may not tear: groups of each axis, single rows where it has none."""
        pairs = {number: 2 for number, axis in enumerate(self.graph.axes) if axis.parent is None and axis.grouped and not axis.samples}
        return {number: rows // max(self.graph.axes[number].samples, pairs.get(number, 1), 1) for number, rows in self.rows.items()}

    @cached_property
    def tokens(self) -> dict[int, int]:
        """Tokens of a response of each axis."""
        tokens_of = dict.fromkeys(range(len(self.graph.axes)), self.assumed.response_tokens)
        for node in self.graph.nodes:
            if node.makes is not None:
                body = self.bodies.get(node.id)
                tokens_of[node.makes] = body.tokens[body.graph.rows] if body else setting(node, "max_tokens")
        return tokens_of

    @property
    def longest(self) -> int:
        """Tokens of the longest responses: of those that are sampled, where any are."""
        return max((self.tokens[node.makes] for node in self.graph.nodes if node.makes is not None), default=self.assumed.response_tokens)

    def read(self, node: Node, item: Input) -> int:
        """Bytes of a column as a node reads it: one of prompts is repeated for the rows."""
        return int(self.per_row(item.column) * self.rows[node.axis])

    def given(self, column: Column) -> int:
        """Bytes of a column as it is stored."""
        return int(self.per_row(column) * self.rows[self.graph.nodes[column.node].rows_axis])

    def per_row(self, column: Column) -> float:
        """Bytes for a row; what is not known counts as a number per row."""
        giver = self.graph.nodes[column.node]
        kind = giver.output(column.name).kind or Kind(Level.ROW)
        size, axis = SIZES.get(kind.dtype or "", 4), giver.rows_axis
        texts = {"completion": self.tokens[axis] * LETTERS, "prompt": self.assumed.prompt_tokens * LETTERS}
        each = {
            Level.TOKEN: self.tokens[axis] * size, Level.PROMPT: self.assumed.prompt_tokens * size, Level.SCALAR: 0, Level.ROW: size,
            Level.GROUP: size * self.groups[axis] / max(self.rows[axis], 1), Level.TEXT: texts.get(column.name, OTHER_TEXT),
        }
        return each[kind.level]


def setting(node: Node, name: str) -> int:
    """A whole number among the settings of a node; 1 where it has none."""
    return int(str(dict(node.settings).get(name) or 1))
