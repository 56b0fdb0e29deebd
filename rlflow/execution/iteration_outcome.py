"""The outcome of an iteration: metrics, times, recorded columns, and the account of its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.author.batch import Batch
from rlflow.author.figures import Figure, Of
from rlflow.compiler.graph.model import Column, Graph, Node, Op
from rlflow.compiler.spans import RankSpan, Span
from rlflow.execution.account import RowAccount
from rlflow.execution.engine import KeptMemory, Metrics
from rlflow.execution.row_figures import ScoredRecords
from rlflow.execution.row_ledger import sampler_of
from rlflow.execution.summary import IterationSummary
from rlflow.execution.tally import PartialMetric, PartialMetrics, accumulated, figures

# scope of the metrics of a node, by its operation
MEASURED = {Op.UPDATE: Of.UPDATE, Op.REWARD: Of.REWARD, Op.STAGE: Of.STAGE}


@dataclass
class Outcome:
    """The outcome of an iteration: metrics, spans of nodes and ranks, recorded columns, and the row account.

    If several trained roles sample, the recorded columns are also kept for each role.
    """

    metrics: Metrics = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    ranks: list[RankSpan] = field(default_factory=list)
    records: dict[str, Any] = field(default_factory=dict)
    policies: dict[str, dict[str, Any]] = field(default_factory=dict)
    # role in ``policies``, or an empty name → which of the recorded columns are scores
    judged: dict[str, ScoredRecords] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    memory: dict[str, KeptMemory] = field(default_factory=dict)  # what the iteration wrote
    summary: IterationSummary = field(default_factory=IterationSummary)
    account: RowAccount = field(default_factory=RowAccount)
    sampler: str = ""  # role that sampled the recorded completions, if several roles sample
    tallies: dict[Figure, PartialMetric] = field(default_factory=dict)  # sums of the metrics logged so far

    def log(self, node: Node, metrics: PartialMetrics) -> None:
        """Add the metrics of a node, merging them if the node already ran in this iteration."""
        self.metrics |= accumulated(
            self.tallies, figures(metrics, MEASURED.get(node.op, Of.NODE), node.name, node.role or "")
        )


@dataclass(frozen=True)
class Sampled:
    """The rows that were sampled ahead for an iteration, with metrics, spans and row account."""

    prompts: Batch
    rows: Mapping[int, Batch] = field(default_factory=dict)  # node that samples or repeats → its rows
    metrics: Metrics = field(default_factory=dict)  # metrics of these nodes
    spans: tuple[Span, ...] = ()
    skipped: str = ""  # why there is nothing to train on; empty if there are rows
    account: RowAccount = field(default_factory=RowAccount)


def sampler_of_records(graph: Graph, recorded: Collection[Column]) -> str:
    """If several roles sample, return the one that sampled the recorded completions.

    Returns an empty string if only one role samples, or if the completions come from several roles.
    """
    makers = [sampler_of(graph.nodes[column.node]) for column in recorded if column.name == "completion"]
    if len(makers) != 1 or len(makers[0]) != 1:
        return ""
    roles = frozenset().union(
        *(sampler_of(node) for node in graph.nodes if node.op in (Op.GENERATE, Op.REPEAT))
    )
    return next(iter(makers[0])) if len(roles) > 1 else ""
