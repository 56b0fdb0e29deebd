"""Stores the columns of an iteration until the last node that reads them is done.

This module also measures how far a single-step update moved the policy, by recomputing the log-probs of a few
rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, spread
from rlflow.author.node_options import ConcatOptions
from rlflow.compiler.graph.model import Column, Input, Node
from rlflow.compiler.plan import Plan
from rlflow.execution.engine import CallOptions, Engine, model_reads
from rlflow.execution.tally import PartialMetric, PartialMetrics

Fetch = Callable[[Data, Axis], Data]  # brings a column into this process


class Store:
    """The columns of one iteration, and the real row axis of each axis of the graph.

    Nodes add columns from their threads. Columns that arrive after ``close`` are dropped.
    """

    def __init__(self) -> None:
        self.columns: dict[Column, Data] = {}
        self.axes: dict[int, Axis] = {}
        self.peak_bytes = 0
        self._bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def put(self, node: Node, batch: Batch, names: tuple[str, ...]) -> None:
        """Store the columns ``names`` that a node returned.

        In ``batch``, the columns have the names used by the node's function.
        """
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
        """Drop columns that no node will read any more."""
        with self._lock:
            dropped = [self.columns.pop(column) for column in columns if column in self.columns]
            self._bytes -= sum(data.nbytes for data in dropped)

    def close(self) -> None:
        """Drop all columns, and ignore columns that arrive later."""
        with self._lock:
            self._closed = True
            self.columns.clear()

    def gather(self, plan: Plan, node: Node, fetch: Fetch) -> Batch:
        """Return the columns that a node reads, under its parameter names and for its rows."""
        axis = self.axes[node.axis]
        return Batch(axis, {item.parameter: self.over(plan, item, axis, fetch) for item in node.inputs})

    def parts(self, plan: Plan, node: Node, fetch: Fetch) -> list[Batch]:
        """Return the batches that a `concat` node joins.

        Each batch has the rows of its part, with the columns that are later read from the joined rows. If the
        node fills columns, batches also have ``tokens``.
        """
        needed, batches = set(plan.keeps(node)), []
        if node.options(ConcatOptions).fill:
            needed.add("tokens")
        for number, part in enumerate(plan.graph.axes[node.rows_axis].parts):
            axis, mark = self.axes[part], f"{number}."
            items = {
                item.parameter.removeprefix(mark): item
                for item in node.inputs
                if item.parameter.startswith(mark)
            }
            batches.append(
                Batch(
                    axis,
                    {
                        name: self.over(plan, item, axis, fetch)
                        for name, item in items.items()
                        if name in needed and item.column in self.columns
                    },
                )
            )
        return batches

    def over(self, plan: Plan, item: Input, axis: Axis, fetch: Fetch) -> Data:
        """Return the column that ``item`` reads, for the rows of ``axis``."""
        own = self.axes[plan.graph.nodes[item.column.node].rows_axis]
        return spread(item.parameter, self.columns[item.column], own, axis, fetch)


# number of rows to run through the model again, spread over the update. This is enough to distinguish 1e-3
# nats from 1e-1, and cheap compared to the update
ROWS = 4
MOVED = "funnel/moved"  # metric of an update; an update with several steps measures it itself


def after_one_step(
    engine: Engine, role: str, batch: Batch, metrics: PartialMetrics, call_options: CallOptions
) -> PartialMetrics:
    """Return the metrics of an update, with MOVED added if the update had a single step.

    MOVED is the mean of |new log-prob - ``logprobs``| over tokens under the mask, in nats, for at most ROWS
    rows. It's left out if the batch lacks the column ``logprobs`` or ``mask``.
    """
    if (
        MOVED not in metrics
        or metrics["steps"].value != 1
        or not {"logprobs", "mask"} <= batch.data.keys()
        or not len(batch)
    ):
        return metrics
    rows = engine.gather(batch.rows(torch.arange(0, len(batch), -(-len(batch) // ROWS))))
    now = engine.gather(
        engine.forward(
            role, ("logprobs",), model_reads(rows, "temperature"), replace(call_options, ahead=False)
        )
    )["logprobs"]
    return {**metrics, MOVED: PartialMetric.of((now - rows["logprobs"]).abs()[rows["mask"].bool()])}
