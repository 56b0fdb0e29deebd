"""Comparison of learning: coverage of the intervals with few seeds, and verdicts of pairs of cells."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated import DRAWS, EFFECT, rows, share, table
from sources import ROOT

from rlflow.benchmarks.curves import Cell, Curve, Point
from rlflow.benchmarks.holm import holm
from rlflow.benchmarks.learning import (
    difference,
    equivalence,
    probability_of_improvement,
    profile_text,
    ranked,
    ranked_all,
    surprise,
)

VALUES = st.lists(st.integers(-1000, 1000).map(float), min_size=5, max_size=12)
DISTRIBUTIONS = {
    "normal": lambda rng, size: rng.normal(size=size),
    "skewed": lambda rng, size: rng.exponential(size=size),
    "bimodal": lambda rng, size: rng.normal(size=size) * 0.5 + np.where(rng.random(size) < 0.5, -1.0, 1.0),
}


def cell(values, name="cell", first=0):
    return Cell(
        name,
        tuple(
            Curve(seed, (Point(0, 0, 0, 0.0), Point(9, 1, 1, float(value))))
            for seed, value in enumerate(values, first)
        ),
    )


def rank(ours, theirs, paired=False, **keywords):
    return ranked(cell(ours), cell(theirs, "base", 0 if paired else 100), **keywords)


@pytest.mark.parametrize("seeds", [5, 10, 20])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_intervals_cover_the_true_difference_of_means(name, seeds):
    """300 pairs of samples of one distribution: at least 90 % coverage of nominal 95 % (Welch, two sizes)."""
    rng = np.random.default_rng(0)
    intervals = [
        difference(DISTRIBUTIONS[name](rng, seeds), DISTRIBUTIONS[name](rng, seeds + 3)).interval
        for _ in range(300)
    ]
    assert np.mean([interval.low <= 0 <= interval.high for interval in intervals]) >= 0.90
    assert all(interval.method == "t" for interval in intervals)


def test_pairs_use_students_interval_and_others_welchs():
    """Computed by hand.

    Differences -1, 0, 1, 2, 3 have mean 1, error 0.7071 and t = 2.776. Means that differ by 0.2 have Welch's
    error of 0.7616 with 5.247 degrees of freedom and t = 2.535.
    """
    paired = difference([0.0, 2, 4, 6, 8], [1.0, 2, 3, 4, 5], paired=True).interval
    assert (paired.low, paired.high) == pytest.approx((1 - 2.776 * 0.7071, 1 + 2.776 * 0.7071), abs=1e-3)
    unpaired = difference([1.0, 2, 3, 4, 5], [2.0, 2.4, 2.8, 3.2, 3.6]).interval
    assert (unpaired.low, unpaired.high) == pytest.approx(
        (0.2 - 2.535 * 0.7616, 0.2 + 2.535 * 0.7616), abs=2e-3
    )
    assert difference([1.0, 1, 1], [0.0, 0, 0], paired=True).text == "1, 1 … 1 (95 %, no spread)"


@given(VALUES, VALUES)
def test_the_probability_of_improvement_counts_pairs_and_is_symmetric(ours, theirs):
    estimate, turned = probability_of_improvement(ours, theirs), probability_of_improvement(theirs, ours)
    assert estimate.value == pytest.approx(np.mean([(x > y) + (x == y) / 2 for x in ours for y in theirs]))
    assert estimate.value + turned.value == pytest.approx(1)
    assert estimate.interval.low + turned.interval.high == pytest.approx(1)
    assert 0 <= estimate.interval.low <= estimate.value <= estimate.interval.high <= 1


def test_five_seeds_all_above_leave_doubt():
    interval = probability_of_improvement([6, 7, 8, 9, 10], [1, 2, 3, 4, 5]).interval
    assert 0.5 < interval.low < 0.75
    assert interval.high == 1


def test_intervals_cover_the_probability_of_improvement():
    rng = np.random.default_rng(0)
    truth = 0.5 * (1 + math.erf(0.5))  # P(X > Y) of normals one standard deviation apart
    intervals = [
        probability_of_improvement(rng.normal(1, 1, 5), rng.normal(0, 1, 5)).interval for _ in range(300)
    ]
    assert np.mean([interval.low <= truth <= interval.high for interval in intervals]) >= 0.90


def test_equivalence_uses_welchs_tost():
    """Computed by hand: means differ by 0.2, variances are 2.5 / 5 and 0.4 / 5.

    This gives an error of 0.7616 with 5.247 degrees of freedom.
    """
    ours, theirs = [1.0, 2, 3, 4, 5], [2.0, 2.4, 2.8, 3.2, 3.6]
    assert equivalence(ours, theirs, 2.0) == pytest.approx(0.0318, abs=0.001)
    assert equivalence(ours, theirs, 2.0) == equivalence(theirs, ours, 2.0)
    assert equivalence(ours, theirs, 0.1) > 0.5
    assert (equivalence([1, 1], [1, 1], 0.1), equivalence([1, 1], [2, 2], 0.1)) == (0, 1)


@pytest.mark.parametrize(
    ("shift", "margin", "higher", "outcome"),
    [
        (3.0, 0.0, True, "better"),
        (3.0, 0.0, False, "worse"),
        (-3.0, 0.5, True, "worse"),
        (-3.0, 0.5, False, "better"),
        (0.0, 1.0, True, "equivalent within the margin"),
        (0.0, 0.0, True, "undecided"),
        (0.3, 0.01, True, "undecided"),
    ],
)
def test_pairs_are_ranked(shift, margin, higher, outcome):
    values = np.linspace(-0.5, 0.5, 6)
    found = rank(values + shift, values, margin=margin, higher=higher)
    assert found.outcome == outcome
    assert outcome in found.text
    assert (found.more is not None) == (outcome == "undecided" and (shift, margin) != (0, 0))
    if found.more:
        assert f"undecided, about {found.more} more seeds" in found.text
    if outcome in ("better", "worse"):
        assert found.improvement.value == (outcome == "better")


@pytest.mark.parametrize(("ours", "theirs"), [(4, 9), (9, 4), (1, 1), (0, 5)])
def test_fewer_than_five_seeds_are_not_ranked(ours, theirs):
    found = rank(range(ours), range(theirs))
    assert found.outcome == "not enough to rank"
    assert found.text == f"cell vs base: not enough to rank, {ours} and {theirs} seeds of at least 5"
    assert rank(range(5), range(5)).outcome == "undecided"


def test_a_seed_without_a_final_value_is_named():
    found = rank([1, 2, math.nan, 4, 5], range(5))
    assert (found.outcome, found.reason) == ("not comparable", "cell has no finite final value for seed 2")
    assert found.text.startswith("cell and base are not comparable: ")


@pytest.mark.parametrize("paired", [False, True])
def test_equal_cells_are_rarely_ranked(paired):
    rng = np.random.default_rng(0)
    wrong = [rank(*DISTRIBUTIONS["skewed"](rng, (2, 6)), paired).outcome != "undecided" for _ in range(200)]
    assert np.mean(wrong) <= 0.06


@pytest.mark.parametrize("seeds", [5, 10, 20])
def test_paired_intervals_cover_the_true_difference(seeds):
    """The shared noise of a seed has 5 times the spread of each run's own noise; the true difference is 0."""
    rng = np.random.default_rng(0)
    common = 5 * rng.normal(size=(400, seeds))
    intervals = [
        difference(both + one, both + other, paired=True).interval
        for both, (one, other) in zip(common, rng.normal(size=(400, 2, seeds)), strict=True)
    ]
    assert np.mean([interval.low <= 0 <= interval.high for interval in intervals]) >= 0.90


def test_equal_seeds_are_compared_in_pairs():
    """Each seed is 1 better than in the base, which is little compared with the differences between seeds."""
    base = np.array([0.0, 10, 20, 30, 40, 50])
    ours = base + 1 + 0.01 * np.sin(base)
    found, unpaired = rank(ours, base, paired=True), rank(ours, base)
    assert (found.outcome, found.paired, unpaired.outcome, unpaired.paired) == (
        "better",
        True,
        "undecided",
        False,
    )
    assert "; 6 pairs of seeds, " in found.text
    assert "; 6 and 6 seeds, " in unpaired.text
    assert rank(ours, base, paired=True, margin=2.0).outcome == "equivalent within the margin"
    assert rank(ours, base, margin=2.0).outcome == "undecided"


def test_equivalence_of_pairs_uses_students_tost():
    """Computed by hand: differences -1, 0, 1, 2, 3 have mean 1, error 0.7071 and 4 degrees of freedom.

    So t is (3 - 1) / 0.7071.
    """
    ours, theirs = [0.0, 2, 4, 6, 8], [1.0, 2, 3, 4, 5]
    assert equivalence(ours, theirs, 3.0, paired=True) == pytest.approx(0.0237, abs=0.0005)


def test_several_equal_cells_are_rarely_found_different():
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(100):
        samples = rng.normal(size=(6, 8))
        cells = [cell(values, f"cell{number}", 100 * number) for number, values in enumerate(samples)]
        wrong += any(each.outcome != "undecided" for each in ranked_all(cells[1:], cells[0]))
    assert wrong <= 11  # more has a probability of 1 % if 5 % are wrong


@given(st.lists(VALUES, min_size=1, max_size=4), VALUES, st.booleans())
def test_holms_procedure_decides_better_and_worse(every, theirs, paired):
    size = min(map(len, (*every, theirs))) if paired else None
    cells = [
        cell(values[:size], f"cell{number}", 0 if paired else 100 * number)
        for number, values in enumerate(every, 1)
    ]
    base = cell(theirs[:size], "base")
    rejected = holm({each.name: surprise(each, base) for each in cells}, 0.05)
    found = {each.cell: each.outcome in ("better", "worse") for each in ranked_all(cells, base)}
    assert found == {name: rejects for name, (_, rejects) in rejected.items()}


def test_a_decided_cell_passes_its_error_part_on():
    rng = np.random.default_rng(5)
    base, noise = cell(rng.normal(size=8), "base", 100), rng.normal(size=8)
    levels = {}
    for shift in (0.0, 30.0):
        others = [cell(noise + 0.1, "near"), cell(noise + shift, "far")]
        near, far = ranked_all(others, base)
        levels[shift] = (near.difference.interval.level, far.outcome)
    assert levels == {0.0: (pytest.approx(0.975), "undecided"), 30.0: (pytest.approx(0.95), "better")}


@given(st.lists(VALUES, min_size=1, max_size=4), VALUES, st.floats(0, 100))
def test_several_cells_are_ranked_more_strictly_than_one(every, theirs, margin):
    cells = [cell(values, f"cell{number}", 100 * number) for number, values in enumerate(every, 1)]
    found = ranked_all(cells, cell(theirs, "base"), margin=margin)
    assert [each.cell for each in found] == [each.name for each in cells]
    for together, one in zip(found, cells, strict=True):
        alone = ranked(one, cell(theirs, "base"), margin=margin)
        assert (
            together.outcome in (alone.outcome, "undecided")
            or alone.outcome == "equivalent within the margin"
        )


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("cells", [3, 5])
def test_five_seeds_keep_the_error_probability(cells, paired):
    """Compare equal cells 200 times: more than 20 wrong verdicts have a probability of 0.1 % if 5 % are wrong.

    Quantiles of resampled pairs gave 34 with 3 cells and 50 with 5.
    """
    assert share("normal", 5, cells, paired, 0.0, 200) <= 0.1


def test_eight_seeds_find_most_large_differences():
    assert (
        0.3 < share("normal", 5, 1, True, EFFECT, 200) < 0.6 < share("normal", 8, 1, True, EFFECT, 200) < 0.85
    )


@pytest.mark.long
def test_the_page_shows_the_simulated_table_within_its_bounds():
    page = (ROOT / "docs" / "bench.md").read_text()
    every = list(rows())
    wrong = [value for _, _, what, values in every if what == "wrong" for each in values for value in each]
    assert max(wrong) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / DRAWS)
    assert table(every) in page


def test_a_profile_counts_seeds_above_each_quartile():
    text = profile_text(cell([1, 2, 3, 4]), cell([5, 6, 7, 8, 9]))
    assert text == "3: 1 of 4 vs 5 of 5, 5: 0 of 4 vs 4 of 5, 7: 0 of 4 vs 2 of 5"
    assert profile_text(cell([2, 2]), cell([2])) == "2: 0 of 2 vs 0 of 1"
    assert profile_text(cell([math.nan]), cell([])) == "no seed has a finite final value"


@given(VALUES, VALUES, st.sampled_from([0.5, 2.0, 1024.0]), st.integers(-50, 50))
def test_scale_and_origin_do_not_change_a_ranking(ours, theirs, scale, origin):
    one = rank(ours, theirs, margin=10.0)
    other = rank(
        [scale * (x + origin) for x in ours], [scale * (x + origin) for x in theirs], margin=10.0 * scale
    )
    assert (one.outcome, one.improvement) == (other.outcome, other.improvement)
    assert other.difference.value == pytest.approx(scale * one.difference.value, abs=1e-9)


@given(VALUES, VALUES)
def test_larger_values_have_a_larger_difference(ours, theirs):
    more = difference([x + 1 for x in ours], theirs).value
    assert more == pytest.approx(difference(ours, theirs).value + 1)


@given(
    st.lists(st.floats(-1e100, 1e100), max_size=8),
    st.lists(st.floats(-1e100, 1e100), max_size=8),
    st.floats(0, 1e6),
    st.booleans(),
)
def test_every_finite_case_has_a_sentence(ours, theirs, margin, paired):
    assert "cell vs base: " in rank(ours, theirs, paired, margin=margin).text
