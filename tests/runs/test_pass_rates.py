"""mean@n, pass@k and maj@k, compared with counts over all draws."""

import itertools
import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.runs.outcomes import Answers, majority, majority_at, pass_at, powers_of_two, repeated_figures

VOTES = st.sampled_from(["4", "5", "6", None])


@given(right=st.lists(st.booleans(), min_size=1, max_size=9), data=st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_right_answer(right, data):
    k = data.draw(st.integers(1, len(right)))
    choices = [any(chosen) for chosen in itertools.combinations(right, k)]
    assert pass_at(len(right), sum(right), k) == pytest.approx(sum(choices) / len(choices))


def brute(extracted, right):
    """Return the probability that the vote is right, averaged over all ways of breaking ties."""
    votes = [answer for answer in extracted if answer is not None]
    if not votes:
        return Fraction(0)
    most = max(votes.count(answer) for answer in votes)
    winners = sorted({answer for answer in votes if votes.count(answer) == most})
    hits = [
        [hit for answer, hit in zip(extracted, right, strict=True) if answer == winner] for winner in winners
    ]
    return sum(Fraction(sum(each), len(each)) for each in hits) / len(winners)


@given(answers=st.lists(st.tuples(VOTES, st.booleans()), min_size=1, max_size=8))
def test_the_majority_is_the_most_frequent_answer_and_ties_are_even(answers):
    extracted, right = zip(*answers, strict=True)
    assert majority(extracted, right) == pytest.approx(float(brute(extracted, right)))


@given(answers=st.lists(st.tuples(VOTES, st.booleans()), min_size=2, max_size=5), data=st.data())
def test_maj_at_k_averages_over_all_choices_of_k_answers(answers, data):
    k = data.draw(st.integers(1, len(answers)))
    choices = [brute(*zip(*chosen, strict=True)) for chosen in itertools.combinations(answers, k)]
    orders = [
        majority_at(Answers([float(hit) for _, hit in order], [said for said, _ in order]), k)
        for order in itertools.permutations(answers)
    ]
    assert sum(orders) / len(orders) == pytest.approx(float(sum(choices) / len(choices)))


def test_a_majority_of_unreadable_answers_is_wrong():
    assert majority([None, None], [True, True]) == 0.0
    assert majority([None, None, "4"], [False, False, True]) == 1.0


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (2, [1, 2]), (3, [1, 2]), (8, [1, 2, 4, 8]), (15, [1, 2, 4, 8])]
)
def test_the_numbers_of_answers_are_powers_of_two(most, sizes):
    assert powers_of_two(most) == sizes


def test_figures_are_means_over_prompts_and_a_pass_scores_one():
    first = Answers([1.0, 0.5, math.nan, 1.0], ["4", "5", None, "4"])
    second = Answers([0.0, 0.0, 0.0, 0.0], ["1", "2", "3", None])
    assert repeated_figures([first, second]) == {
        "mean@4": pytest.approx(2.5 / 7),
        "pass@1": 0.25,
        "pass@2": pytest.approx((1 - 1 / 6) / 2),
        "pass@4": 0.5,
        "maj@2": pytest.approx((0.5 + 1.0) / 4),
        "maj@4": 0.5,
    }


def test_a_majority_needs_answers_and_a_mean_needs_scores():
    assert repeated_figures([Answers([1.0, 0.0], [None, None])]) == {
        "mean@2": 0.5,
        "pass@1": 0.5,
        "pass@2": 1.0,
    }
    assert repeated_figures([Answers([math.nan], [None])]) == {"pass@1": 0.0}
