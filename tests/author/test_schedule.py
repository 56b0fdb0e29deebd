"""Schedules: in which iterations a call is due."""

from hypothesis import given
from hypothesis import strategies as st

from rlflow.author.schedule import ALWAYS, CallSchedule

SCHEDULES = st.builds(CallSchedule, st.integers(1, 7), st.integers(0, 9))


@given(SCHEDULES, st.integers(0, 40))
def test_a_call_is_due_every_so_many_iterations_from_the_first_one(schedule, iterations):
    due = [i for i in range(iterations) if schedule.due(i)]
    assert due == list(range(schedule.after, iterations, schedule.every))
    assert schedule.count(iterations) == len(due)


def test_a_schedule_prints_as_in_the_call():
    shown = {
        str(schedule) for schedule in (ALWAYS, CallSchedule(2), CallSchedule(after=4), CallSchedule(2, 4))
    }
    assert shown == {"every iteration", "every=2", "after=4", "every=2, after=4"}
