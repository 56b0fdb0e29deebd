"""How many rows and bytes the columns of an iteration are expected to have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from rlflow.author.columns import Kind, Level
from rlflow.author.memory import Buffer
from rlflow.author.node_options import EncodeOptions, GenerateOptions
from rlflow.compiler.graph.ancestry import expected_groups, expected_rows, line
from rlflow.compiler.graph.model import Column, Graph, Input, Node, Op
from rlflow.compiler.placement import SIZES, TYPICAL

LETTERS = 4  # bytes of text per token
OTHER_TEXT = 32  # bytes of a string that is neither prompt nor completion, such as an answer


@dataclass(frozen=True)
class Assumed:
    """Assumed sizes that aren't known before a run, such as response lengths."""

    prompts: int  # prompts per iteration
    prompt_tokens: int = TYPICAL[Level.PROMPT]  # tokens of each prompt
    # tokens of each response that comes with the data; a sampled response is assumed to have its max_tokens
    response_tokens: int = TYPICAL[Level.TOKEN]


@dataclass(frozen=True)
class Sizes:
    """The expected sizes of a graph's columns and rows."""

    graph: Graph
    assumed: Assumed
    bodies: Mapping[int, Sizes] = field(default_factory=dict)  # sizes of the bodies of repeats, by node id

    @staticmethod
    def of(graph: Graph, assumed: Assumed) -> Sizes:
        """Estimate the sizes of a graph and of the bodies of its repeats."""
        return Sizes(
            graph, assumed, {node.id: Sizes.of(node.body, assumed) for node in graph.nodes if node.body}
        )

    @cached_property
    def rows(self) -> dict[int, int]:
        """For each axis, the maximum number of rows."""
        return expected_rows(self.graph, self.assumed.prompts)

    @cached_property
    def groups(self) -> dict[int, int]:
        """For each axis, the maximum number of groups, or of rows if there are no groups.

        Generators and stages over groups must keep a group on one rank.
        """
        return {number: expected_groups(self.graph, number, self.rows) for number in self.rows}

    @cached_property
    def tokens(self) -> dict[int, int]:
        """For each axis, the assumed number of tokens in a response."""
        tokens_of = dict.fromkeys(range(len(self.graph.axes)), self.assumed.response_tokens)
        # a draw stands before the put of its rows, so its tokens are only known in a second pass
        for node in (*self.graph.nodes, *self.graph.nodes):
            if node.op is Op.DRAW and node.makes is not None:
                put = self.put_of(str(node.memory))
                tokens_of[node.makes] = tokens_of[put.axis] if put else self.assumed.response_tokens
            elif node.makes is not None:
                body, axis = self.bodies.get(node.id), self.graph.axes[node.makes]
                of = axis.parts or (
                    (axis.parent,) if axis.step == "chosen" and axis.parent is not None else ()
                )
                own = self._made(node)
                whole = (
                    body.tokens[body.graph.rows]
                    if body
                    else max((tokens_of[part] for part in of), default=own)
                )
                tokens_of[node.makes] = whole
        return tokens_of

    def _made(self, node: Node) -> int:
        """Return the assumed number of tokens in the responses that a node makes, or 1 if it makes none."""
        if isinstance(node.settings, EncodeOptions):
            return node.settings.max_tokens or self.assumed.response_tokens
        return node.settings.max_tokens if isinstance(node.settings, GenerateOptions) else 1

    @property
    def longest(self) -> int:
        """The number of tokens in the longest sampled response, or if nothing is sampled, in the data."""
        return max(
            (self.tokens[node.makes] for node in self.graph.nodes if node.makes is not None),
            default=self.assumed.response_tokens,
        )

    def put_of(self, memory: str) -> Node | None:
        """Return the node that puts rows into a buffer, or None if there is none."""
        puts = (node for node in self.graph.nodes if node.op is Op.PUT and node.memory == memory)
        return next(puts, None)

    def read(self, node: Node, item: Input) -> int:
        """Return the bytes of a column as a node reads it.

        Columns of prompts are repeated for the node's rows.
        """
        return int(self.per_row(item.column) * self.rows[node.axis])

    def sent(self, node: Node, item: Input) -> int:
        """Return the bytes of a column as it is sent to a node.

        int64 columns are sent as int32, which is enough for token ids.
        """
        kind = self.graph.nodes[item.column.node].output(item.column.name).kind
        size = self.read(node, item)
        return size // 2 if kind is not None and kind.dtype == "int64" else size

    def given(self, column: Column) -> int:
        """Return the bytes of a column as stored by the node that computes it."""
        return int(self.per_row(column) * self.rows[self.graph.nodes[column.node].rows_axis])

    def per_row(self, column: Column) -> float:
        """Return a column's bytes per row. A column of unknown kind counts as one number per row."""
        giver = self.graph.nodes[column.node]
        kind = giver.output(column.name).kind or Kind(Level.ROW)
        size, axis = SIZES.get(kind.dtype or "", 4), giver.rows_axis
        texts = {"completion": self.tokens[axis] * LETTERS, "prompt": self.assumed.prompt_tokens * LETTERS}
        each = {
            Level.TOKEN: self.tokens[axis] * size,
            Level.PROMPT: self.assumed.prompt_tokens * size,
            Level.SCALAR: 0,
            Level.ROW: size,
            Level.GROUP: size * self.groups[axis] / max(self.rows[axis], 1),
            Level.TEXT: texts.get(column.name, OTHER_TEXT),
        }
        return each[kind.level]


@dataclass(frozen=True)
class NodeRows:
    """The maximum numbers of rows and groups that a node makes in an iteration."""

    node: str
    rows: int
    groups: int
    # False if the number is unknown before a run because follow-up prompts start at single tokens; then
    # ``rows`` counts one per source row
    known: bool = True


@dataclass(frozen=True)
class BufferSize:
    """The largest size of a buffer, in rows and bytes of stored columns."""

    buffer: str
    rows: int
    # includes rows that have left the buffer, but whose memory isn't free yet, and the rows of one put
    bytes: int


def buffer_sizes(sizes: Sizes) -> Iterator[BufferSize]:
    """Yield the largest size of each buffer of the graph that rows are put into."""
    for slot in sizes.graph.memory:
        put = sizes.put_of(slot.name)
        if isinstance(slot.spec, Buffer) and put is not None:
            rows, groups = sizes.rows[put.axis], sizes.groups[put.axis]
            each = -(-rows // max(groups, 1)) if slot.spec.unit == "groups" else 1
            one = sum(sizes.read(put, item) for item in put.inputs)
            most = slot.spec.bound * each
            yield BufferSize(slot.name, most, 2 * one * most // max(rows, 1) + one)


@dataclass(frozen=True)
class ComputedTokens:
    """The maximum number of tokens in a forward pass or update whose rows share prompts.

    ``tokens`` counts those of all rows. ``computed`` counts those that run through the model, with each
    shared prompt counted once.
    """

    node: str
    tokens: int
    computed: int


def computed(prompt_rows: Mapping[int, int], sizes: Sizes) -> Iterator[ComputedTokens]:
    """Yield how many tokens each node in ``prompt_rows`` runs through its model.

    ``prompt_rows``: node id → number of rows that share a prompt. Micro-batches are assumed not to split
    groups.
    """
    for i, each in prompt_rows.items():
        node = sizes.graph.nodes[i]
        rows, prompt = sizes.rows[node.axis], sizes.assumed.prompt_tokens
        responses = rows * sizes.tokens[node.axis]
        yield ComputedTokens(node.name, rows * prompt + responses, -(-rows // each) * prompt + responses)


def rows_of_rows(sizes: Sizes) -> Iterator[NodeRows]:
    """Yield the maximum numbers of rows and groups of each node that makes rows, in program order.

    If the graph has no follow-up prompts, chosen rows or joined rows, nothing is yielded.
    """
    graph = sizes.graph
    if all(axis.step == "sampled" for axis in graph.axes):
        return
    for node in graph.nodes:
        if node.makes is not None:
            yield NodeRows(
                node.name, sizes.rows[node.makes], sizes.groups[node.makes], not _cut(graph, node.makes)
            )


def _cut(graph: Graph, axis: int) -> bool:
    """Return True if the rows come from follow-up prompts that continue responses from single tokens."""
    history = list(line(graph.axes, axis))
    return any(
        graph.axes[step].step == "cut" or any(_cut(graph, part) for part in graph.axes[step].parts)
        for step in history
    )
