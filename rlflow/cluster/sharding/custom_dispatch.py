"""Dispatch modes that an author defines with the functions ``split`` and ``merge``.

Both functions get whole batches and run on rank 0. All ranks run the stage, each on its piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.author.stage import Stage
from rlflow.cluster.calls import Calls
from rlflow.cluster.rpc.message import Answer
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.worker import Worker
from rlflow.execution.engine import CallOptions
from rlflow.execution.tally import PartialMetrics, merged


def by_own_mode(
    calls: Calls,
    pool: Pool[Worker],
    stage: Stage,
    batch: Batch,
    arguments: Mapping[str, Any],
    call_options: CallOptions,
) -> tuple[Batch, PartialMetrics]:
    """Run a stage with an author's dispatch mode, and return its columns and metrics.

    Rank 0 calls ``split(batch, ranks)``, each rank runs the stage on its piece, and then rank 0 calls
    ``merge(outputs, batch)``.
    """
    batch = calls.spread(batch, pool.name)
    everything = torch.arange(len(batch))
    keys = [calls.ledger.key() for _ in range(len(pool))]
    cut = calls.on_one(pool, 0, "split", batch, everything, {**arguments, "keys": keys}, call_options)
    pieces = [_piece(calls, pool, answer, axis) for answer, axis in cut.value]
    answers = calls.on_each(
        pool, "piece", dict(enumerate(pieces)), arguments, call_options, "model" if stage.on else "cpu"
    )
    stored = [
        calls.on_one(
            pool,
            0,
            "hold",
            _output(calls, pool, rank, answers[rank], pieces[rank].axis),
            torch.arange(answers[rank].rows),
            {},
            call_options,
        ).key
        for rank in sorted(answers)
    ]
    whole = calls.on_one(pool, 0, "merge", batch, everything, {**arguments, "outputs": stored}, call_options)
    return calls.kept(pool, {0: whole}, [everything], batch.axis), merged(
        [answers[rank].tallies for rank in sorted(answers)]
    )


def _piece(calls: Calls, pool: Pool[Worker], answer: Answer, axis: tuple[Any, bool]) -> Batch:
    keys, grouped = axis
    return calls.kept(
        pool, {0: answer}, [torch.arange(answer.rows)], Axis(torch.tensor(keys), grouped=grouped)
    )


def _output(calls: Calls, pool: Pool[Worker], rank: int, answer: Answer, axis: Axis) -> Batch:
    split = [torch.arange(answer.rows) if number == rank else torch.arange(0) for number in range(len(pool))]
    return calls.kept(pool, {rank: answer}, split, axis)
