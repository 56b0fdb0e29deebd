"""Plans of flows whose calls aren't all due in every iteration."""

import json

import pytest
from sources import TESTS

from rlflow.cli.plan import due, printed, sums, times

SCHEDULED = f"{TESTS}/execution/flows::scheduled"


def shown(parts):
    from rich.console import Console

    console = Console(width=200, no_color=True)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return [line.rstrip() for line in captured.get().splitlines()]


def test_means_weigh_each_set_by_its_iterations(planned_as):
    cycle = planned_as(SCHEDULED).cycle
    assert cycle.length == 12
    assert sum(each.iterations for each in cycle.sets) == cycle.length
    longest = max(each.makespan for each in cycle.sets)
    assert min(each.makespan for each in cycle.sets) < cycle.mean("makespan") < longest
    by_hand = sum(each.bound * each.iterations for each in cycle.sets) / 12
    assert cycle.mean("bound") == pytest.approx(by_hand)
    assert all(each.bound <= each.makespan for each in cycle.sets)


def test_an_idle_call_takes_no_time_and_reads_nothing(planned_as):
    explanation = planned_as("ppo --hp.warmup 3")
    first, later = explanation.cycle.sets
    assert (first.idle, first.first, first.iterations) == (("actor.update",), 0, 0)
    assert (later.idle, later.first, later.iterations) == ((), 3, 1)
    assert first.makespan < later.makespan == explanation.time.makespan
    assert first.read < later.read == sum(edge.bytes for edge in explanation.edges)


def test_a_plan_says_which_calls_are_due_when(planned_as):
    explanation = planned_as(SCHEDULED)
    lines = shown(due(explanation))
    assert "  reference.logprobs (every=3, after=1): 1, 4, 7, …" in lines
    assert "  extra (every=4, after=1): 1, 5, 9, …" in lines
    (head,) = [line for line in lines if "calls that are not due" in line]
    assert "of 12" in head
    rows = [line.split() for line in lines[lines.index(head) + 1 :]]
    assert sum(int(row[1]) for row in rows if row[0].isdigit()) == 12
    assert any("as means over a cycle of 12 iterations" in line for line in times(explanation))
    assert any("as a mean over the cycle" in line for line in sums(explanation))
    assert "due iterations, counted from 0" in shown(printed(explanation))
    assert json.loads(json.dumps(explanation.as_json()))["cycle"]["length"] == 12


def test_pools_have_a_plan_for_each_set(planned_as):
    explanation = planned_as(f"{SCHEDULED} --pools train=2,rollout=2")
    assert len({each.moved for each in explanation.cycle.sets}) > 2
    assert 0 < explanation.cycle.mean("moved") < explanation.moved


def test_a_plan_without_schedules_has_no_cycle(planned_as):
    explanation = planned_as("grpo")
    assert explanation.cycle is None
    assert explanation.as_json()["cycle"] is None
    assert list(due(explanation)) == []
