"""Settings of the methods: defaults, ranges, all problems at once."""

import math

import pytest

from rlflow.author import methods, rows
from rlflow.errors import FlowError


def test_missing_settings_get_defaults_and_lists_become_tuples():
    bound = methods.bind("actor.generate", methods.GENERATE, {"max_tokens": 8, "stop": ["###"]})
    assert bound == {
        "samples": 1,
        "max_tokens": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "stop": ("###",),
        "stop_token_ids": (),
        "min_tokens": 0,
        "lengths": (),
        "skip_special_tokens": False,
    }


def test_a_whole_number_becomes_a_float_where_the_setting_is_one():
    bound = methods.bind("actor.generate", methods.GENERATE, {"max_tokens": 8, "temperature": 1, "top_k": 3})
    assert [type(bound[name]) for name in ("temperature", "top_k", "max_tokens")] == [float, int, int]


@pytest.mark.parametrize(
    ("specification", "name", "value"),
    [
        (methods.GENERATE, "samples", 0),
        (methods.GENERATE, "samples", True),
        (methods.GENERATE, "samples", 2.0),
        (methods.GENERATE, "temperature", -0.1),
        (methods.GENERATE, "temperature", math.nan),
        (methods.GENERATE, "temperature", math.inf),
        (methods.GENERATE, "top_p", 0),
        (methods.GENERATE, "top_p", 1.1),
        (methods.GENERATE, "top_k", -1),
        (methods.GENERATE, "stop", "###"),
        (methods.GENERATE, "stop", ("",)),
        (methods.UPDATE, "epochs", 0),
        (methods.UPDATE, "minibatch", 0),
        (methods.UPDATE, "mean", "token"),
        (methods.UPDATE, "mean", 0),
        (methods.UPDATE, "after", -1),
        (methods.REPEAT, "groups", 0),
        (methods.REPEAT, "tries", -1),
    ],
)
def test_a_value_out_of_range_is_refused(specification, name, value):
    given = {n: 1 for n, setting in specification.items() if setting.default is methods.REQUIRED} | {
        name: value
    }
    with pytest.raises(FlowError) as caught:
        methods.bind("verb", specification, given)
    assert [(p.code, p.found) for p in caught.value.problems] == [("setting-range", f"{name}={value!r}")]


@pytest.mark.parametrize("mean", ["tokens", "rows", "row-tokens", 1, 0.5])
def test_every_way_to_average_is_accepted(mean):
    assert methods.bind("update", methods.UPDATE, {"mean": mean})["mean"] == mean


def test_all_problems_of_a_call_are_reported_at_once():
    with pytest.raises(FlowError) as caught:
        methods.bind("actor.generate", methods.GENERATE, {"tokens": 8, "temprature": -1, "samples": 0})
    assert [(p.code, p.found, p.nearest) for p in caught.value.problems] == [
        ("unknown-setting", "tokens", None),
        ("unknown-setting", "temprature", "temperature"),
        ("setting-range", "samples=0", None),
        ("missing-setting", "nothing", None),
        ("setting-range", "temperature=-1", None),
    ]


def test_a_trace_continues_with_valid_settings():
    bound, problems = methods.checked("generate", methods.GENERATE, {"samples": 0}, None)
    assert (bound["samples"], bound["max_tokens"], len(problems)) == (1, 1, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"top": "scores"},
        {"count": 2},
        {"column": "good", "count": 2},
        {"top": "scores", "count": 0},
        {"top": "scores", "count": True},
        {"top": "scores", "count": 1, "per": "row"},
    ],
)
def test_rows_are_chosen_by_rank_or_by_a_column(arguments):
    with pytest.raises(FlowError, match="choose takes a bool column"):
        rows.choose(None, **arguments)
