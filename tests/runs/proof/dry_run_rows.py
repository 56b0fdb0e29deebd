"""Rows, updates and records of dry runs, made by hand."""

import torch

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.runs.proof.directions import Direction
from rlflow.runs.proof.dry_run import DryRunRecord, RecordedUpdate, ScoredRows


def rows(tokens, axis=None, **more):
    """Return rows of one prompt token each; the token is the row's number."""
    batch = Batch.of(
        prompt_tokens=[[i] for i in range(len(tokens))],
        tokens=tokens,
        mask=[[True] * len(row) for row in tokens],
        **more,
    )
    return batch if axis is None else Batch(axis, batch.data)


@loss
def gain(new, advantages):
    return -new.logprobs * advantages


def update_of(batch, one=gain):
    return RecordedUpdate("actor.update", "actor", batch, one, {}, 0)


def record(scores, batch, node="reward"):
    return DryRunRecord(scored=[ScoredRows(node, batch, torch.tensor(scores))])


def push(batch, of_rows):
    return Direction(batch, {"scores": torch.tensor(of_rows)})
