"""The schedule with the fewest moves, against all schedules that fit."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.compiler.residency_schedule import MemorySchedule, MemoryStep, ModelPart, fewest, prove, too_large
from rlflow.errors import PlanError

PARTS = [ModelPart("actor", "trainer", name) for name in "abcd"]


@st.composite
def schedules(draw):
    """Draw up to four parts of unlike sizes over up to five moments, some with transient bytes."""
    parts = PARTS[: draw(st.integers(1, 4))]
    sizes = {part: draw(st.integers(1, 6)) for part in parts}
    needs = draw(st.lists(st.frozensets(st.sampled_from(parts)), min_size=1, max_size=5))
    passing = [{ModelPart("actor", "generator", "cache"): draw(st.integers(0, 4))} for _ in needs]
    moments = tuple(MemoryStep(str(at), *pair) for at, pair in enumerate(zip(needs, passing, strict=True)))
    fixed = {ModelPart("reference", "trainer", "weights"): draw(st.integers(0, 3))}
    return MemorySchedule("all", moments, sizes, fixed, draw(st.integers(4, 24)))


def cost(schedule, awake):
    moves = replace(schedule, awake=tuple(awake)).moves
    return len(moves), sum(move.bytes for move in moves)


def best_cost(schedule):
    """Return the lowest cost of all schedules that fit."""
    subsets = [
        frozenset(some)
        for count in range(len(schedule.sizes) + 1)
        for some in itertools.combinations(schedule.sizes, count)
    ]
    fitting = [
        [some for some in subsets if some >= moment.needs and schedule.held(moment, some) <= schedule.limit]
        for moment in schedule.moments
    ]
    best = None
    for start in fitting[0]:
        costs = {start: (0, 0)}
        for choices in [*fitting[1:], [start]]:
            costs = {
                now: min(
                    (
                        cost[0] + len(now ^ before),
                        cost[1] + sum(schedule.sizes[part] for part in now ^ before),
                    )
                    for before, cost in costs.items()
                )
                for now in choices
            }
        best = min(best or costs[start], costs[start])
    return best


@given(schedules())
def test_the_schedule_takes_the_fewest_moves_and_bytes(schedule):
    if list(too_large(schedule)):
        return
    found = replace(schedule, awake=fewest(schedule))
    assert prove(found) == found.peak <= schedule.limit
    assert cost(schedule, found.awake) == best_cost(schedule)


@given(schedules())
def test_a_refused_schedule_fits_with_the_memory_of_the_remedy(schedule):
    problems = list(too_large(schedule))
    hopeless = any(schedule.held(moment, moment.needs) > schedule.limit for moment in schedule.moments)
    assert bool(problems) == hopeless
    for problem in problems:
        asked = int(problem.remedy.removeprefix("--memory ").partition(";")[0])
        worst = max(schedule.held(moment, moment.needs) for moment in schedule.moments)
        assert schedule.limit < asked <= worst
    if problems:
        assert not list(
            too_large(
                replace(
                    schedule,
                    limit=max(
                        int(problem.remedy.removeprefix("--memory ").partition(";")[0])
                        for problem in problems
                    ),
                )
            )
        )


@given(schedules())
def test_nothing_moves_if_everything_fits(schedule):
    schedule = replace(schedule, limit=schedule.peak_without)
    found = replace(schedule, awake=fewest(schedule))
    assert (found.moves, found.moving) == ((), False)
    assert found.peak == found.peak_without


def test_an_invalid_schedule_is_detected():
    one, other = PARTS[:2]
    moments = (MemoryStep("first", frozenset([one])), MemoryStep("second", frozenset([other])))
    schedule = MemorySchedule("all", moments, {one: 5, other: 6}, {}, 8)
    assert prove(replace(schedule, awake=fewest(schedule))) == 6
    with pytest.raises(PlanError, match="first on all"):
        prove(replace(schedule, awake=(frozenset([one, other]), frozenset([other]))))
    with pytest.raises(PlanError, match=r"missing actor\.trainer b"):
        prove(replace(schedule, awake=(frozenset([one]), frozenset())))


def test_an_unneeded_part_stays_away_and_ties_go_by_bytes():
    small, large, unused = PARTS[:3]
    moments = (
        MemoryStep("all", frozenset([small, large])),
        MemoryStep("alone", frozenset(), {ModelPart("x", "generator", "cache"): 5}),
    )
    schedule = MemorySchedule("all", moments, {small: 2, large: 3, unused: 4}, {}, 9)
    awake = fewest(schedule)
    assert awake == (frozenset([small, large]), frozenset([large]))
    assert cost(schedule, awake) == (2, 4)


def test_fixed_memory_is_named_alone_or_after_the_needed_parts():
    weights, cache = ModelPart("actor", "trainer", "weights"), {ModelPart("actor", "generator", "cache"): 9}
    for needs, said in (
        (frozenset(), "always"),
        (frozenset([weights]), "actor.trainer weights 5 bytes, and always"),
    ):
        (problem,) = too_large(MemorySchedule("all", (MemoryStep("it", needs, {}),), {weights: 5}, cache, 8))
        assert problem.found == f"{said} actor.generator cache 9 bytes"
