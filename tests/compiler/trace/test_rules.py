"""What a loss or a stage requires of its rows, checked for rows of every history."""

import pytest

from rlflow import group, loss, row, text, token
from rlflow.compiler.graph.model import RowAxis
from rlflow.compiler.trace.rules import joined_kinds, missing, update_rules
from rlflow.errors import Place


@loss(rows="group")
def of_groups(new, scores, group):
    return new.logprobs, {}


@loss
def of_rows(new, scores):
    return new.logprobs, {}


ROWS = {
    "of prompts": RowAxis(),
    "sampled": RowAxis(0, samples=4, grouped=True),
    "alone": RowAxis(0, samples=1, grouped=True),
    "chosen": RowAxis(1, grouped=True, step="chosen"),
    "whole groups": RowAxis(1, samples=4, grouped=True, step="chosen"),
}


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ("of prompts", ["no-groups"]),
        ("sampled", []),
        ("alone", ["single-groups"]),
        ("chosen", ["thin-groups"]),
        ("whole groups", []),
    ],
)
def test_a_group_loss_needs_groups_of_several_rows(rows, code):
    assert [problem.code for problem in update_rules(of_groups, ROWS[rows], "it", None)] == code
    assert list(update_rules(of_rows, ROWS[rows], "it", None)) == []


@pytest.mark.parametrize(
    ("kinds", "fit"),
    [
        ([row("float32")], True),
        ([row("float32"), row("float32")], True),
        ([row("float32"), None], True),
        ([None, None], True),
        ([group("float32"), row("float32")], True),
        ([row("float32"), token("float32")], False),
        ([row("float32"), row("int64")], False),
        ([row("float32"), text], False),
    ],
)
def test_joined_columns_of_one_name_need_one_kind(kinds, fit):
    problem = joined_kinds("bonus", kinds, None)
    assert (problem is None) == fit
    assert fit or (problem.code, problem.found) == ("joined-kinds", ", ".join(map(str, kinds)))


def test_only_functions_have_parameters_for_settings():
    remedies = [
        missing("choose", "hard", ["prompt"], None, defined, ()).remedy
        for defined in (None, Place("mine.py", 3))
    ]
    assert [("'*'" in str(remedy)) for remedy in remedies] == [False, True]
    assert remedies[0] == "merge the stage that gives it first: batch |= <stage giving 'hard'>(batch)"
