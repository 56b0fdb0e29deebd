"""Columns of an iteration while nodes still read them."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from rlflow.axis import Axis
from rlflow.batch import Batch, Data, spread
from rlflow.graph.model import Column, Node
from rlflow.plan import Plan


class Store:
    """Columns of one iteration, and the real row axis of each of the graph's. Nodes put from their threads; once closed it stays
    empty, whatever a late node still brings."""

    def __init__(self) -> None:
        self.columns: dict[Column, Data] = {}
        self.axes: dict[int, Axis] = {}
        self.peak_bytes = 0
        self._bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def put(self, node: Node, batch: Batch, names: tuple[str, ...]) -> None:
        """Keep the outputs that are read later. ``batch`` has them under the names that the function knows."""
        with self._lock:
            if self._closed:
                return
            self.axes.setdefault(node.rows_axis, batch.axis)
            for output in node.outputs:
                if output.name in names:
                    data = self.columns[Column(node.id, output.name)] = batch.data[output.source]
                    self._bytes += data.nbytes
            self.peak_bytes = max(self.peak_bytes, self._bytes)

    def free(self, columns: Iterable[Column]) -> None:
        with self._lock:
            gone = [self.columns.pop(column) for column in columns if column in self.columns]
            self._bytes -= sum(data.nbytes for data in gone)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.columns.clear()

    def gather(self, plan: Plan, node: Node) -> Batch:
        """The node's inputs under its parameters' names, spread over its rows."""
        axis = self.axes[node.axis]
        found: dict[str, Data] = {}
        for item in node.inputs:
            data, own = self.columns[item.column], self.axes[plan.graph.nodes[item.column.node].rows_axis]
            found[item.parameter] = spread(item.parameter, data, own, axis)
        return Batch(axis, found)

