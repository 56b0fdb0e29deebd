"""The simulated pupil on whose answers the packaged model is trained: its mistakes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.benchmarks.arithmetic import pupil

NUMBERS = st.integers(0, 999)


class Always:
    """A random generator that always draws the first choice."""

    def random(self):
        return 0.0

    def randrange(self, stop):
        return 0

    def choice(self, options):
        return options[0]


@pytest.mark.parametrize(
    ("terms", "forgets", "slips", "answer"),
    [
        ("27 + 15", 1.0, 0.0, "32"),
        ("32 - 15", 1.0, 0.0, "27"),
        ("11 - 33", 1.0, 0.0, "22"),
        ("11 - 33", 0.0, 0.0, "-22"),
        ("11 + 11", 0.0, 1.0, "02"),
    ],
)
def test_the_pupil_makes_the_described_mistakes(terms, forgets, slips, answer):
    assert pupil(terms.split(), Always(), forgets, slips) == answer


@given(NUMBERS, st.sampled_from("+-"), NUMBERS)
def test_without_mistakes_every_answer_is_right(first, sign, second):
    assert int(pupil([str(first), sign, str(second)], random.Random(0), 0.0, 0.0)) == (
        first + second if sign == "+" else first - second
    )


@given(NUMBERS, NUMBERS)
def test_the_pupil_forgets_the_carry_of_a_sum(first, second):
    ones = int(str(first)[-1]) + int(str(second)[-1])
    assert int(pupil([str(first), "+", str(second)], random.Random(0), 1.0, 0.0)) == first + second - 10 * (
        ones > 9
    )


@given(NUMBERS, NUMBERS)
def test_the_pupil_forgets_the_borrow_and_the_sign_of_a_difference(first, second):
    low, high = sorted((first, second))
    borrowed = int(str(high)[-1]) < int(str(low)[-1])
    assert (
        int(pupil([str(first), "-", str(second)], random.Random(0), 1.0, 0.0)) == high - low + 10 * borrowed
    )


@given(NUMBERS, NUMBERS, st.integers(0, 9))
def test_a_slip_changes_one_digit(first, second, seed):
    right, slipped = str(first + second), pupil([str(first), "+", str(second)], random.Random(seed), 0.0, 1.0)
    assert len(slipped) == len(right)
    assert sum(one != other for one, other in zip(right, slipped, strict=True)) == 1
