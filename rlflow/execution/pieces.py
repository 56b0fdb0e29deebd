"""Scoring in pieces: keeps chunks of sampled rows and the results for each, and joins the results."""

from __future__ import annotations

import threading

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.compiler.graph.model import Node
from rlflow.compiler.plan import Piece, Plan
from rlflow.execution.engine import Chunks, Engine
from rlflow.execution.store import Fetch, Store
from rlflow.execution.tally import PartialMetrics, merged


class Pieces:
    """The chunks and the results of pieces while a plan runs. Nodes add results from their threads.

    A chunk is dropped as soon as all pieces that read it are done.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._chunks: dict[tuple[int, int], Batch] = {}
        self._unread: dict[tuple[int, int], int] = {}
        self._made: dict[int, dict[int, tuple[Batch, PartialMetrics]]] = {}
        self._lock = threading.Lock()

    def into(self, source: Node) -> Chunks:
        """Return how many chunks a sampling node splits its rows into, and which columns the pieces read."""
        nodes = {piece.node for piece in self._plan.pieces.values() if piece.source == source.id}
        read = {
            item.column.name
            for i in sorted(nodes)
            for item in self._plan.graph.nodes[i].inputs
            if item.column.node == source.id
        }
        names = tuple(output.source for output in source.outputs if output.name in read)
        return Chunks(len(self._plan.chunks[source.id]) + 1, names)

    def add(self, source: Node, number: int, rows: Batch) -> None:
        """Keep chunk ``number`` of the node's rows until all pieces that read it are done."""
        readers = sum(
            (piece.source, piece.chunk) == (source.id, number) for piece in self._plan.pieces.values()
        )
        with self._lock:
            self._chunks[source.id, number], self._unread[source.id, number] = rows, readers

    def axis(self, piece: Piece) -> Axis:
        """Return the axis of the chunk that a piece reads."""
        return self._chunks[piece.source, piece.chunk].axis

    def gather(self, store: Store, piece: Piece, fetch: Fetch) -> Batch:
        """Return the inputs of a piece: the columns of its chunk, and other columns at the chunk's rows."""
        nodes, chunk = self._plan.graph.nodes, self._chunks[piece.source, piece.chunk]
        columns: dict[str, Data] = {}
        for item in nodes[piece.node].inputs:
            source = nodes[item.column.node]
            if source.id == piece.source:
                columns[item.parameter] = chunk.data[source.output(item.column.name).source]
            else:
                columns[item.parameter] = store.over(self._plan, item, chunk.axis, fetch)
        return Batch(chunk.axis, columns)

    def put(self, piece: Piece, result: Batch | None, metrics: PartialMetrics) -> None:
        """Store the result of a piece. Raises ValueError if rows are missing from it."""
        chunk = self.axis(piece)
        if result is None or len(result) != len(chunk):
            raise ValueError(f"found {len(result or ())} rows, expected {len(chunk)}")
        with self._lock:
            self._made.setdefault(piece.node, {})[piece.chunk] = Batch(chunk, result.data), metrics
            self._unread[piece.source, piece.chunk] -= 1
            if not self._unread[piece.source, piece.chunk]:
                del self._chunks[piece.source, piece.chunk]

    def joined(self, engine: Engine, node: Node) -> tuple[Batch, PartialMetrics]:
        """Return the joined results of all pieces of a node, in row order, and the node's metrics."""
        results = self._made.pop(node.id)
        parts = [results[number] for number in sorted(results)]
        return engine.in_order([rows for rows, _ in parts]), merged([metrics for _, metrics in parts])
