"""Sources alternate by their weights, always within one prompt of their share."""

from fractions import Fraction
from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.data.shares import turns

WEIGHTS = st.lists(st.fractions("1/1000", 1000, max_denominator=1000), min_size=1, max_size=7)


@given(WEIGHTS)
@settings(max_examples=60, deadline=None)
def test_the_count_of_each_source_stays_within_the_bound(weights):
    bound = 1 - Fraction(1, max(2 * len(weights) - 2, 1))
    counts = [0] * len(weights)
    for turn, source in enumerate(islice(turns(weights, counts), 200), 1):
        counts[source] += 1
        assert (
            max(
                abs(weight / sum(weights) * turn - count)
                for weight, count in zip(weights, counts, strict=True)
            )
            <= bound
        )


@given(WEIGHTS, st.integers(0, 60))
@settings(max_examples=60, deadline=None)
def test_shares_continue_from_their_counts_as_if_never_stopped(weights, cut):
    whole = list(islice(turns(weights, [0] * len(weights)), 120))
    counts = [whole[:cut].count(source) for source in range(len(weights))]
    assert list(islice(turns(weights, counts), 120 - cut)) == whole[cut:]


def test_the_order_for_two_weights_is_known():
    assert list(islice(turns([Fraction(7, 10), Fraction(3, 10)], [0, 0]), 10)) == [
        0,
        1,
        0,
        0,
        0,
        1,
        0,
        0,
        1,
        0,
    ]
