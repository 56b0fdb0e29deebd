"""What a loss or a stage requires of its rows, checked for rows of every history."""

import pytest

from rlflow import loss
from rlflow.compiler.graph.model import RowAxis
from rlflow.compiler.trace.rules import update_rules


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
