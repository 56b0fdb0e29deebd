"""The learning rate at each step."""

import pytest

from rlflow.errors import PlanError
from rlflow.training.schedule import Schedule


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule(2.0), [2, 2, 2]),
        (Schedule(2.0, warmup=4), [0.5, 1, 1.5, 2, 2]),
        (Schedule(2.0, "linear", 0, 4), [2, 1.5, 1, 0.5, 0, 0]),
        (Schedule(2.0, "linear", 2, 4), [1, 2, 2, 1, 0]),
        (Schedule(2.0, "cosine", 0, 4), [2, 1 + 2**-0.5, 1, 1 - 2**-0.5, 0, 0]),
    ],
)
def test_each_schedule_gives_its_rates(schedule, expected):
    assert [schedule.rate(step) for step in range(len(expected))] == pytest.approx(expected, abs=1e-12)


def test_a_decaying_schedule_needs_an_end():
    with pytest.raises(PlanError, match="found:    warmup=5 and 5 updates in all"):
        Schedule(1.0, "linear", 5, 5)
