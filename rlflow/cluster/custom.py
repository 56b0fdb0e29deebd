"""Dispatch modes of an author's own: their functions see whole batches, so they run on rank 0 of the pool; the pieces run on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rlflow.author.stage import Stage
from rlflow.batch import Axis, Batch
from rlflow.cluster.message import Answer
from rlflow.cluster.pool import Pool
from rlflow.execution.engine import Terms
from rlflow.execution.tally import Tallies, merged

if TYPE_CHECKING:
    from rlflow.cluster.engine import ClusterEngine
    from rlflow.cluster.worker import Worker


def by_own_mode(
    engine: ClusterEngine, pool: Pool[Worker], stage: Stage, batch: Batch, arguments: Mapping[str, Any], terms: Terms
) -> tuple[Batch, Tallies]:
    """``split(batch, ranks)`` on rank 0, each piece on its rank, ``merge(outputs, batch)`` on rank 0."""
    batch = engine.spread(batch, pool.name)
    everything = torch.arange(len(batch))
    keys = [engine.key() for _ in range(len(pool))]
    cut = engine.on_one(pool, 0, "split", batch, everything, {**arguments, "keys": keys}, terms)
    pieces = [_piece(engine, pool, answer, axis) for answer, axis in cut.value]
    answers = engine.on_each(pool, "piece", dict(enumerate(pieces)), arguments, terms, "model" if stage.on else "cpu")
    held = [engine.on_one(pool, 0, "hold", _output(engine, pool, rank, answers[rank], pieces[rank].axis),
                          torch.arange(answers[rank].rows), {}, terms).key for rank in sorted(answers)]
    whole = engine.on_one(pool, 0, "merge", batch, everything, {**arguments, "outputs": held}, terms)
    return engine.kept(pool, {0: whole}, [everything], batch.axis), merged([answers[rank].tallies for rank in sorted(answers)])


def _piece(engine: ClusterEngine, pool: Pool[Worker], answer: Answer, axis: tuple[Any, bool]) -> Batch:
    keys, grouped = axis
    return engine.kept(pool, {0: answer}, [torch.arange(answer.rows)], Axis(torch.tensor(keys), grouped=grouped))


def _output(engine: ClusterEngine, pool: Pool[Worker], rank: int, answer: Answer, axis: Axis) -> Batch:
    split = [torch.arange(answer.rows) if number == rank else torch.arange(0) for number in range(len(pool))]
    return engine.kept(pool, {rank: answer}, split, axis)
