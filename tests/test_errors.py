"""Error messages: all parts of a message, and no text that could control a terminal."""

import ast
import os
from dataclasses import fields, replace

import pytest
from sources import PACKAGE, sources

from rlflow.errors import (
    MESSAGE,
    FlowError,
    Place,
    PlanError,
    Problem,
    RemoteFailure,
    RunHeld,
    StageError,
    listed,
    nearest,
    printable,
)

PROBLEM = Problem(
    "missing-column",
    "stage 'gae' needs column 'values'",
    Place("ppo.py", 70),
    Place("ppo.py", 30),
    "columns scores",
    "column 'values'",
    "values_",
    "merge it",
    "beta=0.0",
)


# one line for each part that is faulty, below a problem with the remedy
DETAILS = {"checkpoint-damaged", "data-record"}
REMEDY = [field.name for field in fields(Problem)].index("remedy")


def makes_a_problem(call):
    return ast.unparse(call.func) in ("Problem", "PlanError.of", "RunHeld.of")


def remedy_of(call):
    """Return the expression of a call's remedy or of its **keywords, or None."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    return call.args[REMEDY] if len(call.args) > REMEDY else given.get("remedy", given.get(None))


def may_be_empty(value):
    if isinstance(value, ast.IfExp):
        return may_be_empty(value.body) or may_be_empty(value.orelse)
    return isinstance(value, ast.Constant) and not value.value


def test_every_problem_has_a_remedy():
    calls = [
        (f"{source.path}:{node.lineno}", node)
        for source in sources(*PACKAGE)
        for node in source.nodes
        if isinstance(node, ast.Call) and makes_a_problem(node)
    ]
    assert len(calls) > 500
    lacking = [
        place
        for place, call in calls
        if ((remedy := remedy_of(call)) is None or may_be_empty(remedy))
        and not any(isinstance(each, ast.Constant) and each.value in DETAILS for each in call.args)
        and "severity='note'" not in ast.unparse(call)
    ]
    assert lacking == []


def test_a_problem_has_a_line_for_each_known_part():
    assert str(PROBLEM).splitlines() == [
        "ppo.py:70: with beta=0.0, stage 'gae' needs column 'values'",
        "  defined:  ppo.py:30",
        "  found:    columns scores",
        "  expected: column 'values'",
        "  nearest:  values_",
        "  remedy:   merge it",
    ]
    assert str(Problem("x", "it is so", severity="note")) == "note: it is so"


def test_an_error_prints_all_its_problems_and_is_hashable():
    error = FlowError(PROBLEM, Problem("x", "and more"))
    assert str(error) == f"{PROBLEM}\nand more"
    assert {error: 1}[error] == 1
    assert issubclass(RunHeld, PlanError)


def test_a_plan_error_is_made_in_one_line():
    error = PlanError.of("flag", "no such flag", found="--x", remedy="remove it")
    assert error.problems == (Problem("flag", "no such flag", found="--x", remedy="remove it"),)


def test_a_record_of_another_process_prints_in_one_line():
    record = RemoteFailure(
        "KeyError", "'x'", ("r.py:2, in f: d[x]", "r.py:9, in g: f()", "r.py:12, in h: g()")
    )
    assert record.message == "KeyError: 'x'"
    assert str(record) == "KeyError: 'x'; called by r.py:9, in g: f(), r.py:12, in h: g()"
    assert str(replace(record, lines=(), place="/r.py:2", hint="--flag")) == "/r.py:2: KeyError: 'x' (--flag)"
    assert len(str(replace(record, lines=(), text="x" * 10**6))) == MESSAGE


def test_a_record_gives_its_notes_to_an_error():
    error = ValueError("here")
    RemoteFailure("KeyError", "'x'", notes=("of the user", "in a worker")).add_notes_to(error)
    assert error.__notes__ == ["of the user", "in a worker"]


def test_a_place_is_relative_if_that_is_shorter(tmp_path):
    assert str(Place(os.path.abspath("algorithms/ppo.py"), 3)) == os.path.join("algorithms", "ppo.py") + ":3"
    assert str(Place("/x.py", 3)) == "/x.py:3"


def test_a_place_is_one_line_for_any_file_name():
    assert str(Place("/a\nb\x1b[31m.py", 3)) == "/a\\nb\\x1b[31m.py:3"


def test_control_characters_are_escaped():
    assert printable("\x1b[31mred\u202e\x07\ttab\n") == "\\x1b[31mred\\u202e\\x07\ttab\n"
    assert "\x1b" not in str(Problem("x", "\x1b[31m", found="\x1b[31m"))
    assert "\x1b" not in str(StageError("s", 0, 1, "\x1b[31m"))


def test_a_stage_error_names_stage_iteration_rows_and_shapes():
    error = StageError(
        "gae", 3, 8, "ValueError: no", Place("ppo.py", 70), {"rewards": "token float32 [8, 5]"}
    )
    assert str(error).splitlines() == [
        "ppo.py:70: stage 'gae' failed in iteration 3 on 8 rows: ValueError: no",
        "  rewards: token float32 [8, 5]",
    ]
    assert {error: 1}[error] == 1


def test_the_nearest_name_is_similar():
    assert nearest("score", ["scores", "logprobs"]) == "scores"
    assert nearest("banana", ["scores", "logprobs"]) is None
    assert nearest("x", []) is None


@pytest.mark.parametrize(
    ("written", "names", "meant"),
    [
        ("gpro", ("gspo", "grpo"), "grpo"),
        ("epochs", ("eps",), None),
        ("temperature", ("generator",), None),
        ("Save-Every", ("save_every",), "save_every"),
        ("lrs", ("lr",), "lr"),
        ("ab", ("ba",), None),
        ("minibatches", ("minibatch",), "minibatch"),
        ("a", ("b",), None),
        ("/models/small", ("/models/large",), None),
    ],
)
def test_swapped_letters_count_as_one_mistake(written, names, meant):
    assert nearest(written, names) == meant


def test_long_lists_are_cut_and_counted():
    assert listed([]) == "none"
    assert listed(["a", "b"]) == "a, b"
    assert listed(map(str, range(20)), limit=2) == "0, 1, … (20 in all)"


def test_an_error_is_raised_only_if_there_are_problems():
    problems = [Problem("one", "the first"), Problem("two", "the second")]
    with pytest.raises(PlanError) as refused:
        PlanError.refuse(problem for problem in problems)
    assert refused.value.problems == tuple(problems)
    PlanError.refuse(())
