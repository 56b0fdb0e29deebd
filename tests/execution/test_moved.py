"""After an update of one step, the run measures its effect on a few rows; updates of several steps measure it
themselves.
"""

import pytest
import torch

from rlflow.author.batch import Batch, Data
from rlflow.author.columns import standard_kind
from rlflow.execution.engine import CallOptions
from rlflow.execution.local_engine import LocalEngine
from rlflow.execution.role_model import Model
from rlflow.execution.store import MOVED, ROWS, after_one_step
from rlflow.execution.tally import known

NOW = -3.0


class Certain:
    """A trainer with one log-prob for all tokens."""

    def __init__(self):
        self.asked = []

    def forward(self, batch, want):
        self.asked.append((len(batch), want))
        lengths = batch.data["tokens"].lengths
        return Batch(
            batch.axis,
            {"logprobs": Data(standard_kind("logprobs"), torch.full((int(lengths.sum()),), NOW), lengths)},
        )


@pytest.fixture
def trainer():
    return Certain()


def measured(trainer, steps=1.0, moved=0.0, **columns):
    count = 10
    batch = Batch.of(
        prompt_tokens=[[1]] * count,
        tokens=[[2, 3]] * count,
        mask=[[True, i % 2 == 0] for i in range(count)],
        **columns,
    )
    engine = LocalEngine({"actor": Model(trainer=trainer)}, {}, 0, lambda number: None)
    return after_one_step(
        engine,
        "actor",
        batch,
        known({"steps": steps} | ({MOVED: moved} if moved is not None else {})),
        CallOptions(),
    )


def test_the_mean_change_of_a_token_is_measured_over_the_update(trainer):
    # every third row is computed; rows 3 and 9 have one masked token each
    before = [[-1.0 if i in (0, 3, 6, 9) else 7.0, -2.0] for i in range(10)]
    metrics = measured(trainer, logprobs=before)
    assert metrics[MOVED].value == pytest.approx((4 * 2.0 + 2 * 1.0) / 6)
    assert trainer.asked == [(ROWS, ("logprobs",))]
    assert metrics["steps"].value == 1.0


BEFORE = [[-1.0, -1.0]] * 10


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"steps": 2.0, "moved": 0.25, "logprobs": BEFORE}, 0.25),
        ({"steps": 0.0, "logprobs": BEFORE}, 0.0),
        ({}, 0.0),
        ({"moved": None, "logprobs": BEFORE}, None),
    ],
)
def test_other_updates_are_not_measured(trainer, options, kept):
    metrics = measured(trainer, **options)
    assert (metrics[MOVED].value if MOVED in metrics else None) == kept
    assert trainer.asked == []
