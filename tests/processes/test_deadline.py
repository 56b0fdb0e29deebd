"""A deadline counts only the seconds during which its process could run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.processes.deadline import LOOK, Deadline

LOOKS = st.lists(st.floats(0.0, 2 * LOOK), max_size=30)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@given(LOOKS, st.floats(0.0, 10.0))
def test_a_deadline_checked_often_follows_time(looks, seconds):
    clock = Clock()
    deadline = Deadline(seconds, clock)
    for passed in looks:
        clock.now += passed
        left = deadline.left()
        assert left == pytest.approx(seconds - (clock.now - 100.0))
        assert deadline.wait() == pytest.approx(min(max(left, 0.0), LOOK))


@given(LOOKS, st.floats(2 * LOOK + 0.01, 1e6), st.integers(0, 29))
def test_a_time_without_checks_counts_as_one_check(looks, stopped, at):
    clock = Clock()
    deadline = Deadline(10.0, clock)
    for i, passed in enumerate([*looks[:at], stopped, *looks[at:]]):
        clock.now += passed
        deadline.left()
        assert i < len(looks) + 1
    assert deadline.left() == pytest.approx(10.0 - sum(looks) - LOOK)
