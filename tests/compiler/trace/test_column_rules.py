"""What a call requires of the columns that it reads and joins."""

import pytest

from rlflow import group, row, text, token
from rlflow.compiler.trace.column_rules import joined_kinds, missing
from rlflow.errors import Place


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
