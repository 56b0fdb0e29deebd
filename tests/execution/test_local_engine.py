"""Calls of the engine that plans and eager flows share."""

import pytest
import torch

from rlflow import stage
from rlflow.author.batch import Batch
from rlflow.author.figures import Figure, Of
from rlflow.execution.local_engine import LocalEngine
from rlflow.execution.role_model import Model


def engine(scores):
    return LocalEngine({}, {"reward": lambda batch: (scores[: len(batch)], {})}, 0, lambda count: None)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.float64, "float64"), (torch.float32, "float32"), (torch.int64, "float32")]
)
def test_scores_are_float32_except_in_a_float64_run(dtype, kept):
    rows, metrics = engine(torch.tensor([1, 2], dtype=dtype)).reward(
        "reward", Batch.of(completion=["a", "b"])
    )
    assert rows.columns["scores"].dtype == kept
    assert (metrics["mean"].value, metrics["missing"].value) == (1.5, 0.0)


def test_rows_of_failed_episodes_are_not_scored():
    batch = Batch.of(completion=["a", "b", "c"], failed=["", "timeout", ""])
    rows, metrics = engine(torch.tensor([1.0, 3.0, 9.0])).reward("reward", batch)
    assert rows["scores"].isnan().tolist() == [False, True, False]
    assert rows["scores"][[0, 2]].tolist() == [1.0, 3.0]
    assert {name: tally.value for name, tally in metrics.items()} == {
        "mean": 2.0,
        Figure(Of.MISSING, "timeout"): 1.0,
        "missing": 1.0,
    }


def test_a_stage_with_side_effects_updates_the_version_of_its_role():
    calls = LocalEngine({"actor": Model(trainer=object())}, {}, 0, lambda count: None)
    for pure, version in ((True, 0), (False, 1)):
        seen = stage(on="actor", pure=pure)(lambda actor, scores: {})
        calls.stage(seen, Batch.of(scores=[1.0]), {}, 0)
        assert calls.models["actor"].version == version


def test_all_scores_are_missing_if_all_episodes_failed():
    rows, metrics = engine(torch.tensor([1.0])).reward("reward", Batch.of(completion=["a"], failed=["died"]))
    assert rows["scores"].isnan().all()
    assert metrics["missing"].value == 1.0


def test_a_wrong_number_of_scores_is_refused():
    with pytest.raises(ValueError, match=r"found scores of shape \[1\], expected \[2\]"):
        engine(torch.tensor([1.0])).reward("reward", Batch.of(completion=["a", "b"]))
