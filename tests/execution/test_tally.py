"""Metrics merged from parts equal those of the full batch, bit for bit."""

import math
from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st
from keyed import keyed

from rlflow.author.figures import Of
from rlflow.execution.tally import PartialMetric, accumulated, exact_sum, figures, merged

FLOATS = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=60)


@given(FLOATS)
def test_a_sum_is_exact(values):
    assert exact_sum(torch.tensor(values, dtype=torch.float64)) == sum(map(Fraction, values), Fraction(0))


@given(st.lists(st.floats(width=32), max_size=60), st.lists(st.integers(0, 60), max_size=5), st.randoms())
def test_a_metric_does_not_depend_on_the_division_of_its_rows(values, cuts, random):
    whole = PartialMetric.of(torch.tensor(values))
    shuffled = random.sample(values, len(values))
    ends = sorted(min(cut, len(values)) for cut in cuts)
    parts = [
        PartialMetric.of(torch.tensor(shuffled[a:b]))
        for a, b in zip([0, *ends], [*ends, len(values)], strict=True)
    ]
    both = [tally.value for tally in (whole, merged([{"mean": part} for part in parts])["mean"])]
    assert both[0] == both[1] or all(map(math.isnan, both))


def test_a_repeated_node_adds_to_its_metrics_by_their_kind():
    tallies = {}
    for values in ([1.0, 3.0], [math.nan], [8.0]):
        row = torch.tensor(values)
        more = {
            "mean": PartialMetric.of(row),
            "top_max": PartialMetric.of(row, "max"),
            "rows": PartialMetric.sum(float(len(row))),
        }
        found = accumulated(tallies, figures(more, Of.STAGE, "node"))
    assert keyed(found) == {"node/mean": 4.0, "node/top_max": 8.0, "node/rows": 4.0}


def test_a_non_finite_value_stays_non_finite():
    assert exact_sum(torch.tensor([1.0, math.inf], dtype=torch.float64)) == math.inf
    assert math.isnan(PartialMetric.of(torch.tensor([math.inf, -math.inf])).value)
    assert (
        PartialMetric.of(torch.tensor([math.inf])) + PartialMetric.of(torch.tensor([1.0]))
    ).value == math.inf
    assert PartialMetric.of(torch.tensor([math.nan, 2.0])).value == 2.0
