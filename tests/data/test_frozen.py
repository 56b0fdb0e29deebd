"""Entries of tasks survive a round trip through JSON, whatever their types."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import PlanError
from rlflow.data.frozen import frozen, thawed

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
)
MARKS = st.sampled_from(["__tuple__", "__set__", "__dict__", "__x"])
KEYS = st.text(max_size=3) | MARKS | st.integers(-9, 9) | st.tuples(st.integers(0, 3))
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.sets(st.integers(-9, 9) | st.text(max_size=2), max_size=3)
    ),
    max_leaves=8,
)


def same(one, other):
    """Return whether two values are equal, with equal types at every level."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        pairs = zip(sorted(one.items(), key=repr), sorted(other.items(), key=repr), strict=False)
        return len(one) == len(other) and all(same(key, its) and same(a, b) for (key, a), (its, b) in pairs)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@settings(deadline=None, max_examples=80)
@given(VALUES)
def test_a_frozen_value_thaws_to_itself(value):
    assert same(thawed(json.loads(json.dumps(frozen(value)))), value)


def test_plain_values_and_lists_are_unchanged_in_json():
    assert frozen({"question": ["1", 2, None, True], "n": 0.5}) == {
        "question": ["1", 2, None, True],
        "n": 0.5,
    }
    assert frozen((1, {2})) == {"__tuple__": [1, {"__set__": [2]}]}
    assert frozen({1: "a"}) == {"__dict__": [[1, "a"]]}


def test_a_value_without_a_text_form_is_refused():
    with pytest.raises(PlanError, match=r"cannot be written as JSON(.|\n)*found: +object"):
        frozen({"entry": [object()]})
