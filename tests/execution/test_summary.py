"""Rows with a non-finite number."""

import pytest
import torch

from rlflow.author.batch import Batch
from rlflow.execution.summary import broken_rows, largest


def test_a_masked_out_token_breaks_no_row():
    nan = float("nan")
    batch = Batch.of(logprobs=[[-1.0, nan], [nan, -1.0], [-1.0]], mask=[[True, False], [True, True], [True]])
    records = {name: batch.select(name) for name in ("logprobs", "mask")}
    assert broken_rows(records) == ["1.0"]
    assert broken_rows({"logprobs": batch.select("logprobs")}) == ["0.0", "1.0"]


def test_a_row_without_a_score_is_broken():
    scores = Batch.of(scores=torch.tensor([1.0, float("inf"), float("nan")]))
    assert broken_rows({"scores": scores}) == ["1.0", "2.0"]


def test_the_summary_names_the_column_with_the_largest_number():
    scores = Batch.of(scores=torch.tensor([1.0, -1e20, float("inf")])).select("scores")
    logprobs = Batch.of(logprobs=[[-1.0], [-3.0]]).select("logprobs")
    assert largest({"scores": scores, "logprobs": logprobs}) == ("scores", pytest.approx(1e20))
    assert largest({}) == ("", 0.0)
