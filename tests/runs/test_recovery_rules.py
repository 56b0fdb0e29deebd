"""When a run goes back to the moment before a death, and when it gives up: the rules, with pools in this
process."""

import re

import pytest

from rlflow.errors import RemoteError
from rlflow.runs.recovery import DEATHS, DriverState, Recovery


class Copied:
    """An in-memory checkpoint that is complete at once."""

    complete = True

    def settled(self, seconds):
        return True

    def then(self, action):
        action()


class Pools:
    """Workers whose deaths are the errors that mention one."""

    def __init__(self):
        self.restarted, self.restored = [], []

    def commit(self, iteration):
        return Copied()

    def death(self, error):
        return "a worker died" if "dead" in str(error) else None

    def lost(self):
        return None

    def restart(self, death):
        self.restarted.append(death)
        return ["all"]

    def restore(self, commit):
        self.restored.append(commit)


def recovered(every=1):
    """Make a recovery and the list of iterations that it restarts from."""
    backs = []
    driver = DriverState(
        capture=lambda: None,
        rewind=lambda state: None,
        replay=lambda iteration, state: backs.append(iteration),
    )
    return Recovery(Pools(), every, driver, lambda text: None), backs


def offload_plan(recovery, deaths, end=6, message="dead"):
    """Run iterations with as many worker deaths as ``deaths`` gives for each, and note each start."""
    left, began = dict(deaths), []

    def run(first):
        for iteration in range(first, end):
            recovery.commit(iteration)
            began.append(iteration)
            if left.get(iteration, 0):
                left[iteration] -= 1
                raise RemoteError(message)
        return began

    return run


def test_an_iteration_in_which_a_worker_died_is_repeated():
    recovery, backs = recovered()
    assert recovery.run(offload_plan(recovery, {2: 1}), 0) == [0, 1, 2, 2, 3, 4, 5]
    assert backs == [2]
    assert len(recovery.workers.restarted) == len(recovery.workers.restored) == 1


def test_all_iterations_since_the_last_commit_are_repeated():
    recovery, backs = recovered(every=3)
    assert recovery.run(offload_plan(recovery, {5: 1}), 0) == [0, 1, 2, 3, 4, 5, 3, 4, 5]
    assert backs == [3]


def test_a_finished_iteration_resets_the_count_of_deaths():
    recovery, backs = recovered()
    recovery.run(offload_plan(recovery, dict.fromkeys(range(5), DEATHS - 1)), 0)
    assert len(backs) == 5 * (DEATHS - 1)


def test_too_many_deaths_in_one_iteration_end_the_run():
    recovery, backs = recovered()
    with pytest.raises(
        RemoteError,
        match=re.escape(f"dead\n  the run gives up: {DEATHS} deaths without a finished iteration in between"),
    ):
        recovery.run(offload_plan(recovery, {2: DEATHS}), 0)
    assert backs == [2] * (DEATHS - 1)


def test_other_errors_are_raised_unchanged():
    recovery, backs = recovered()
    with pytest.raises(RemoteError) as caught:
        recovery.run(offload_plan(recovery, {2: 1}, message="a bug"), 0)
    assert (str(caught.value), backs) == ("a bug", [])


def test_without_commits_nothing_is_recovered():
    recovery, backs = recovered(every=0)
    with pytest.raises(RemoteError, match="^dead$"):
        recovery.run(offload_plan(recovery, {0: 1}), 0)
    assert backs == []
