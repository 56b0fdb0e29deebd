"""Trusted comparisons and gates: a comparison is checked against others of its suite and kind of machine."""

import json

import pytest

from rlflow.benchmarks.journal import FILE as OBSERVATIONS
from rlflow.benchmarks.journal import Measured, Turn
from rlflow.benchmarks.past_results import FILE, gate_values, judge_gates, kind, trust, write_result
from rlflow.benchmarks.results import row
from rlflow.benchmarks.suite import Cell, Gate, Goal, Settings, Suite
from rlflow.errors import PlanError

GATES = (Gate(metric="seconds"), Gate(metric="reward/mean", cell="one"))
SUITE = Suite(
    "mine", Settings(), Goal(), GATES, (Cell("one", "rlflow", "grpo", {}), Cell("two", "rlflow", "grpo", {}))
)


def finished(folder, seconds, number, complete=True):
    place = folder / f"run-{number}"
    place.mkdir()
    values = {"one: seconds": seconds, "two: seconds": 2.0, "one: reward/mean": 0.5}
    write_result(SUITE, place, values, complete)
    return place, values


def states(tmp_path, seconds, number=99):
    place, values = finished(tmp_path, seconds, number)
    return {gate.metric: gate.state for gate in judge_gates(SUITE, place, values).gates}


def test_gates_pass_without_history_and_fail_outside_it(tmp_path):
    for number, seconds in enumerate([1.0, 1.01, 0.99, 1.02]):
        assert str(number + 1) in trust(finished(tmp_path, seconds, number)[0])
    assert set(states(tmp_path, 1.5, 90).values()) == {"no history"}
    trust(finished(tmp_path, 0.98, 4)[0])
    assert states(tmp_path, 1.0, 91) == {
        "one: seconds": "inside",
        "two: seconds": "inside",
        "one: reward/mean": "inside",
    }
    assert states(tmp_path, 1.5, 92)["one: seconds"] == "regression"
    assert states(tmp_path, 0.5, 93)["one: seconds"] == "improvement"


def test_a_history_excludes_itself_other_machines_and_other_suites(tmp_path):
    for number in range(5):
        trust(finished(tmp_path, 1.0 + number / 100, number)[0])
    place = tmp_path / "run-0"
    values = json.loads((place / "result.json").read_text())["values"]
    assert {gate.runs for gate in judge_gates(SUITE, place, values).gates} == {4}
    history = tmp_path / FILE
    history.write_text(history.read_text().replace(kind(), "another machine"))
    assert {gate.runs for gate in judge_gates(SUITE, place, values).gates} == {0}


def test_earlier_results_of_a_folder_count_once(tmp_path):
    """A comparison of the same name uses the same folder, and cells with changed code are measured again."""
    place = tmp_path / "mine"
    place.mkdir()
    for number in range(6):
        with (place / OBSERVATIONS).open("a") as log:
            log.write(f"{number}\n")
        write_result(
            SUITE,
            place,
            values := {"one: seconds": 1.0 + number / 100, "two: seconds": 2.0, "one: reward/mean": 0.5},
            True,
        )
        assert {gate.runs for gate in judge_gates(SUITE, place, values).gates} == {number}
        assert f"{number + 1} comparison" in trust(place)
        assert "trusted already" in trust(place)
    assert len((tmp_path / FILE).read_text().splitlines()) == 6


@pytest.mark.parametrize(
    ("values", "complete", "found"),
    [
        ({"one: seconds": 1.0}, False, "an unfinished comparison"),
        ({"one: seconds": None}, True, "no number for one: seconds"),
        ({}, True, "no gates"),
    ],
)
def test_only_a_complete_comparison_is_trusted(tmp_path, values, complete, found):
    write_result(SUITE, tmp_path, values, complete)
    with pytest.raises(PlanError, match="cannot be trusted") as refused:
        trust(tmp_path)
    assert found in refused.value.problems[0].found
    assert not (tmp_path.parent / FILE).exists()


def test_a_folder_without_a_comparison_is_refused(tmp_path):
    with pytest.raises(PlanError, match="does not contain a comparison"):
        trust(tmp_path / "nowhere")


def test_gates_use_the_tables_numbers_and_none_of_failed_cells():
    turn = Turn(
        0,
        0,
        [{"iteration": 0, "wall": 2.0, "tokens": 10, "metrics": {"reward/mean": 0.5}}],
        [],
        4.0,
        7,
        1.0,
        [0],
    )
    good, bad = Measured([turn]), Measured([turn], failed={0: "no"})
    cells = [(row("one", "k", good, SUITE.goal), good), (row("two", "l", bad, SUITE.goal), bad)]
    assert gate_values(SUITE, cells) == {"one: seconds": 2.0, "two: seconds": None, "one: reward/mean": 0.5}
