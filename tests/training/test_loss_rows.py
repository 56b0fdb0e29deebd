"""The rows that an update learns from."""

import pytest
import torch

from rlflow import group, loss, row
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.errors import FlowError
from rlflow.training.loss_rows import group_of, learnable, mask_counts

NAN = float("nan")


def batch(**more):
    return Batch.of(
        prompt_tokens=[[5]] * 4,
        tokens=[[1, 2], [3], [4, 5, 6], [7]],
        mask=[[True, False], [True], [True, True, False], [False]],
        **more,
    )


@loss
def reads(new, advantages, scores=None): ...


@loss(rows="group")
def reads_groups(new, scores): ...


def kept(batch, loss):
    """Return the first token of each kept row."""
    return learnable(batch, loss).batch["tokens"][:, 0].tolist()


def test_only_masked_values_can_break_a_row():
    rows = batch(advantages=[[0.0, NAN], [NAN], [0.0, torch.inf, 0.0], [NAN]])
    assert kept(rows, reads) == [1, 7]
    assert learnable(rows, reads).left_out == 2


def test_row_values_can_break_a_row_and_unread_columns_cannot():
    unread = [[NAN] * 2, [NAN], [NAN] * 3, [NAN]]
    rows = batch(
        advantages=[[0.0, 0.0], [0.0], [0.0] * 3, [0.0]], scores=[1.0, NAN, 2.0, torch.inf], returns=unread
    )
    assert kept(rows, reads) == [1, 4]


def test_a_broken_row_removes_its_group():
    assert kept(batch(scores=[0.0, NAN, 1.0, 1.0], group=[8, 8, 9, 9]), reads_groups) == [4, 7]


def test_rows_of_a_prompt_are_a_group_without_a_group_column():
    rows = Batch.of(prompt_tokens=[[5]] * 2, x=[1.0, 2.0])
    repeated = rows.repeat(3).drop("group")
    assert group_of(repeated).tolist() == [0, 0, 0, 1, 1, 1]


def test_a_group_column_breaks_its_rows():
    axis = Axis.fresh(2).repeat(2)
    rows = Batch(axis, {**batch().data, "level": Data(group(torch.float32), torch.tensor([NAN, 1.0]))})

    @loss
    def reads_level(new, level: row(torch.float32)): ...

    assert kept(rows, reads_level) == [4, 7]


def test_only_read_columns_are_kept():
    result = learnable(
        batch(advantages=[[0.0, 0.0], [0.0], [0.0] * 3, [0.0]], answer=["a"] * 4, temperature=[1.0] * 4),
        reads,
    )
    assert set(result.batch.columns) == {"prompt_tokens", "tokens", "mask", "advantages", "temperature"}
    assert mask_counts(result.batch).tolist() == [1, 1, 2, 0]


def test_a_missing_column_is_named():
    with pytest.raises(FlowError, match="no column 'advantages'"):
        learnable(batch(), reads)
