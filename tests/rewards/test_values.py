"""A reward's return value becomes a number with further numbers, or a missing score with its cause."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.rewards import hints, reward_pool
from rlflow.rewards.reward import held
from rlflow.rewards.values import KEY, LARGEST, OTHERS, missing, number, raised, verdict

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.lists(st.floats()),
    st.complex_numbers(),
)


@given(st.dictionaries(st.text() | st.integers() | st.just("score"), ANYTHING))
def test_a_dictionary_gives_its_score_and_other_finite_numbers(returned):
    found = verdict(returned)
    accepted = reward_pool._verdict(found, built_in=False)
    assert (list(accepted) if isinstance(accepted, tuple) else accepted) == found
    if isinstance(found, list):
        assert found == verdict(returned["score"]) if "score" in returned else found[0] == "type"
        return
    score, others = (found["score"], found["others"]) if isinstance(found, dict) else (found, {})
    assert score == float(returned["score"])
    assert all(
        math.isfinite(number) and number == float(returned[key]) and KEY.fullmatch(key)
        for key, number in others.items()
    )
    named = [key for key in returned if isinstance(key, str) and key != "score" and KEY.fullmatch(key)]
    assert len(others) == min(OTHERS, sum(isinstance(verdict(returned[key]), float) for key in named))


@pytest.mark.parametrize(
    ("returned", "cause", "says"),
    [
        ({"score": None, "depth": 3}, "none", "None"),
        ({"accuracy": 1.0}, "type", "without 'score': .* instead of 'accuracy'"),
        ({}, "type", "without 'score'"),
        ({"score": "1"}, "type", "returned str"),
        ({"score": math.nan}, "nan", "nan"),
    ],
)
def test_a_dictionary_without_a_score_is_missing(returned, cause, says):
    found, message = verdict(returned)
    assert found == cause
    assert re.search(says, message)


def test_a_raised_error_is_a_record_that_the_pool_accepts(capfd):
    def fails():
        open("data.txt")  # noqa: SIM115 - a relative path, in the private folder of a worker

    with pytest.raises(FileNotFoundError) as caught:
        fails()
    cause, record = raised(caught.value)
    assert (cause, record.type, record.hint) == ("raised", "FileNotFoundError", hints.FOLDER)
    assert record.place.startswith(f"{__file__}:")
    assert "Traceback" in capfd.readouterr().err
    assert reward_pool._verdict([cause, record], built_in=False) == (cause, record)
    assert missing([cause, record], ("died",)) is missing([cause, b"text"], ("raised",)) is None


@pytest.mark.parametrize(
    "reply",
    [
        {"score": 1.0},
        {"score": 1.0, "others": {"a b": 1.0}},
        {"score": 1.0, "others": {"a": math.inf}},
        {"score": 1.0, "others": {1: 1.0}},
        {"score": "x", "others": {"a": 1.0}},
        {"score": 1.0, "others": {f"k{i}": 1.0 for i in range(OTHERS + 1)}},
        {"score": 1.0, "others": {"a": 1.0}, "more": 1},
    ],
)
def test_an_unknown_reply_is_invalid(reply):
    with pytest.raises(reward_pool.Died):
        reward_pool._verdict(reply, built_in=False)


class Array:
    """An array with the interface of array libraries."""

    def __init__(self, shape, value=1.5):
        self.shape, self.value = shape, value

    def item(self):
        return self.value


def test_only_an_array_without_dimensions_is_a_number():
    assert number(Array(())) == 1.5
    assert number(Array((1,)))[0] == "type"


@pytest.mark.parametrize("returned", [1e308, -3.5e38, 10**400, {"score": 1e39}])
def test_a_number_beyond_float32_is_missing_with_that_cause(returned):
    cause, message = verdict(returned)
    assert cause == "overflow"
    assert "too large for float32" in message
    assert reward_pool._verdict([cause, message], built_in=False) == (cause, message)


def test_the_largest_float32_numbers_are_scores():
    assert (
        [number(sign * LARGEST) for sign in (1, -1)]
        == [LARGEST, -LARGEST]
        == torch.tensor([LARGEST, -LARGEST]).double().tolist()
    )


def test_a_sum_beyond_float32_is_missing():
    sums, lost = held(torch.tensor([6e38, 1.0, math.nan], dtype=torch.float64), torch.float32)
    assert (lost, sums.isnan().tolist(), float(sums[1])) == (1, [True, False, True], 1.0)
    assert held(torch.tensor([6e38], dtype=torch.float64), torch.float64)[1] == 0
