"""How far an update of one optimizer step moves the policy. Within such an update nothing has moved yet when its loss is computed, so a few
of its rows are computed once more after it."""

from __future__ import annotations

from dataclasses import replace

import torch

from rlflow.author.batch import Batch
from rlflow.execution.engine import CallOptions, Engine, model_reads
from rlflow.execution.tally import PartialMetric, PartialMetrics

ROWS = 4  # that are computed again, spread over the update: enough to tell 1e-3 nats from 1e-1, and cheap beside the update
MOVED = "funnel/moved"  # the metric of an update; several steps measure it as they go


def after_one_step(engine: Engine, role: str, batch: Batch, metrics: PartialMetrics, terms: CallOptions) -> PartialMetrics:
    """The metrics of an update of the role on ``batch``, of one step with MOVED measured after it: the mean of |log-prob - ``logprobs``|
    over the tokens under the mask, in nats. Metrics of other updates are as they were."""
    if MOVED not in metrics or metrics["steps"].value != 1 or not {"logprobs", "mask"} <= batch.data.keys() or not len(batch):
        return metrics
    rows = engine.gather(batch.rows(torch.arange(0, len(batch), -(-len(batch) // ROWS))))
    now = engine.gather(engine.forward(role, ("logprobs",), model_reads(rows, "temperature"), replace(terms, ahead=False)))["logprobs"]
    return {**metrics, MOVED: PartialMetric.of((now - rows["logprobs"]).abs()[rows["mask"].bool()])}
