"""Columns of an iteration while nodes still read them.

Here too: how far an update of one step moves the policy, which the next iteration's log-probs tell.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, spread
from rlflow.compiler.graph.model import Column, Input, Node
from rlflow.compiler.plan import Plan
from rlflow.execution.engine import CallOptions, Engine, model_reads
from rlflow.execution.tally import PartialMetric, PartialMetrics

Fetch = Callable[[Data, Axis], Data]  # brings a column here


class Store:
    """Columns of one iteration, and the real row axis of each of the graph's. Nodes put from their threads;
    once closed it stays empty, whatever a late node still brings."""

    def __init__(self) -> None:
        self.columns: dict[Column, Data] = {}
        self.axes: dict[int, Axis] = {}
        self.peak_bytes = 0
        self._bytes = 0
        self._closed = False
        self._lock = threading.Lock()

    def put(self, node: Node, batch: Batch, names: tuple[str, ...]) -> None:
        """Keep the outputs that are read later. ``batch`` has them under the names that the function
        knows."""
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
        """Drop columns that no node reads any more."""
        with self._lock:
            dropped = [self.columns.pop(column) for column in columns if column in self.columns]
            self._bytes -= sum(data.nbytes for data in dropped)

    def close(self) -> None:
        """Drop all columns. Columns that come later are dropped too."""
        with self._lock:
            self._closed = True
            self.columns.clear()

    def gather(self, plan: Plan, node: Node, fetch: Fetch) -> Batch:
        """The node's inputs under its parameters' names, spread over its rows."""
        axis = self.axes[node.axis]
        return Batch(axis, {item.parameter: self.over(plan, item, axis, fetch) for item in node.inputs})

    def parts(self, plan: Plan, node: Node, fetch: Fetch) -> list[Batch]:
        """The batches that a joining node reads: of each part the columns that are read of the whole, over
        the part's rows."""
        needed, batches = set(plan.keeps(node)), []
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
                        if name in needed
                    },
                )
            )
        return batches

    def over(self, plan: Plan, item: Input, axis: Axis, fetch: Fetch) -> Data:
        """A column over some rows."""
        own = self.axes[plan.graph.nodes[item.column.node].rows_axis]
        return spread(item.parameter, self.columns[item.column], own, axis, fetch)


# that are computed again, spread over the update: enough to tell 1e-3 nats from 1e-1, and cheap beside the
# update
ROWS = 4
MOVED = "funnel/moved"  # the metric of an update; several steps measure it as they go


def after_one_step(
    engine: Engine, role: str, batch: Batch, metrics: PartialMetrics, terms: CallOptions
) -> PartialMetrics:
    """The metrics of an update of the role on ``batch``, of one step with MOVED measured after it: the mean
    of |log-prob - ``logprobs``| over the tokens under the mask, in nats. Metrics of other updates are as they
    were."""
    if (
        MOVED not in metrics
        or metrics["steps"].value != 1
        or not {"logprobs", "mask"} <= batch.data.keys()
        or not len(batch)
    ):
        return metrics
    rows = engine.gather(batch.rows(torch.arange(0, len(batch), -(-len(batch) // ROWS))))
    now = engine.gather(
        engine.forward(role, ("logprobs",), model_reads(rows, "temperature"), replace(terms, ahead=False))
    )["logprobs"]
    return {**metrics, MOVED: PartialMetric.of((now - rows["logprobs"]).abs()[rows["mask"].bool()])}
