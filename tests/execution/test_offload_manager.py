"""The offload manager keeps needed parts in memory and never exceeds the limit, whatever the order of calls."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.compiler.residency_schedule import (
    MemorySchedule,
    MemoryStep,
    ModelPart,
    computing,
    copying,
    fewest,
    learning,
    parts,
    sampling,
    syncing,
)
from rlflow.errors import PlanError
from rlflow.execution.offload_manager import OffloadManager

CACHE, GRADIENT = ModelPart("actor", "generator", "cache"), ModelPart("actor", "trainer", "gradient")
SIZES = {
    ModelPart(role, half, what): size
    for role, half, what, size in [
        ("actor", "trainer", "weights", 4),
        ("actor", "trainer", "optimizer", 8),
        ("actor", "generator", "weights", 4),
        ("critic", "trainer", "weights", 4),
        ("critic", "trainer", "optimizer", 8),
        ("reference", "trainer", "weights", 4),
    ]
}
CALLS = [
    ("weights", syncing("actor")),
    ("sample", sampling("actor")),
    ("logprobs", computing("actor")),
    ("ref", computing("reference")),
    ("values", computing("critic")),
    ("critic", learning("critic")),
    ("actor", learning("actor")),
]
BESIDE = [("saved", copying("actor")), ("saved too", copying("critic"))]


def offload_plan(limit):
    def moments(calls):
        passing = {CACHE: 5, GRADIENT: 4}
        return tuple(
            MemoryStep(
                step, needs.intersection(SIZES), {part: passing[part] for part in needs.intersection(passing)}
            )
            for step, needs in calls
        )

    made = MemorySchedule("all", moments(CALLS), SIZES, {}, limit, beside=moments(BESIDE))
    return replace(made, awake=fewest(made))


class Rank:
    """The contents of a memory with a hard limit."""

    def __init__(self, limit):
        self.offload_plan, self.there, self.moved = offload_plan(limit), set(), []
        self.offloads = OffloadManager(self.offload_plan)
        for role, half in dict.fromkeys((part.role, part.half) for part in SIZES):
            self.there |= parts(
                role, half, *(part.what for part in SIZES if (part.role, part.half) == (role, half))
            )
            self.offloads.loaded(role, half, Side(self, role, half))
        assert not self.there

    def call(self, needs):
        self.offloads.settle(needs)
        passing = 5 * (CACHE in needs) + 4 * (GRADIENT in needs)
        assert needs.intersection(SIZES) <= self.there
        assert sum(SIZES[part] for part in self.there) + passing <= self.offload_plan.limit


class Side:
    def __init__(self, rank, role, half):
        self.rank, self.role, self.half = rank, role, half

    def sleep(self, *names):
        gone = parts(self.role, self.half, *names)
        assert gone <= self.rank.there
        self.rank.there -= gone
        self.rank.moved += [(part, True) for part in sorted(gone)]

    def wake(self, *names):
        back = parts(self.role, self.half, *names)
        assert not back & self.rank.there
        self.rank.there |= back
        self.rank.moved += [(part, False) for part in sorted(back)]
        assert sum(SIZES[part] for part in self.rank.there) <= self.rank.offload_plan.limit


@pytest.mark.parametrize("limit", [16, 18, 20, 24, 28])
def test_an_iteration_makes_the_planned_moves(limit):
    rank = Rank(limit)
    for _ in range(2):
        for _, needs in CALLS:
            rank.call(needs)
    rank.offloads.moved()
    rank.moved.clear()
    for _, needs in CALLS:
        rank.call(needs)
    assert sorted(rank.moved) == sorted((move.part, move.away) for move in rank.offload_plan.moves)
    assert rank.offloads.moved() == {
        "residency/moves": len(rank.moved),
        "residency/bytes": sum(SIZES[part] for part, _ in rank.moved),
    }


@given(
    st.sampled_from([16, 18, 20, 24, 28]),
    st.lists(st.sampled_from([needs for _, needs in (*CALLS, *BESIDE)]), max_size=30),
)
def test_calls_in_any_order_never_exceed_the_limit(limit, calls):
    rank = Rank(limit)
    for needs in calls:
        rank.call(needs)


def test_nothing_moves_if_everything_fits():
    offloads = OffloadManager(offload_plan(100))
    offloads.loaded("actor", "trainer", None)
    offloads.settle(learning("actor"))
    assert (offloads.moved(), offloads.in_memory) == ({}, set())
    OffloadManager().settle(learning("actor"))


def test_a_full_offload_target_is_a_problem_of_the_settings():
    class Full:
        def sleep(self, *names):
            raise OSError(28, "No space left on device")

    with pytest.raises(PlanError, match="the trainer of role 'actor' cannot be offloaded"):
        OffloadManager(offload_plan(16)).loaded("actor", "trainer", Full())
