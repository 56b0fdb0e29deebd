"""Weights of rows, and compatible shapes and averages."""

import pytest
import torch

from rlflow.training.objective import MinibatchTotals, check_mean, row_weights, weighted_sum

MASK = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
VALUE = torch.tensor([[1.0, 2.0, torch.nan, torch.nan], [3.0, torch.nan, 5.0, 10.0], [torch.nan] * 4])
COUNTS = MASK.sum(1)


@pytest.mark.parametrize(
    ("mean", "expected"),
    [("tokens", 21 / 5), ("row-tokens", (1.5 + 6) / 2), (4, 21 / (2 * 4)), (0.5, 21 / (2 * 0.5))],
)
def test_means_of_values_per_token(mean, expected):
    weights = row_weights(COUNTS, mean, MinibatchTotals.of(COUNTS))
    assert float(weighted_sum(VALUE, MASK, weights, mean)) == pytest.approx(expected)


@pytest.mark.parametrize(("mean", "expected"), [("rows", 5.0), (4, 10 / (2 * 4))])
def test_means_of_values_per_row(mean, expected):
    """The third row has an empty mask: it counts in no divisor and adds nothing."""
    weights = row_weights(COUNTS, mean, MinibatchTotals.of(COUNTS))
    assert float(weighted_sum(torch.tensor([3.0, 7.0, torch.nan]), MASK, weights, mean)) == pytest.approx(
        expected
    )


def test_the_divisor_counts_the_full_minibatch():
    """Two halves with the totals of both add up to the value of the full minibatch."""
    totals = MinibatchTotals.of(COUNTS)
    parts = [
        weighted_sum(VALUE[i], MASK[i], row_weights(COUNTS[i], "row-tokens", totals), "row-tokens")
        for i in ([0], [1, 2])
    ]
    assert float(sum(parts)) == pytest.approx((1.5 + 6) / 2)


def test_only_masked_values_reach_value_and_gradient():
    value = VALUE.clone().requires_grad_()
    weighted_sum(value, MASK, row_weights(COUNTS, "tokens", MinibatchTotals.of(COUNTS)), "tokens").backward()
    assert torch.equal(value.grad, MASK / 5)


@pytest.mark.parametrize(
    ("value", "mean", "message"),
    [
        (
            VALUE,
            "rows",
            "mean='rows' for a loss with one value per token, expected 'tokens' or 'row-tokens' or a number",
        ),
        (
            VALUE[:, 0],
            "tokens",
            "mean='tokens' for a loss with one value per row, expected 'rows' or a number",
        ),
        (VALUE[:, 0], "row-tokens", "mean='row-tokens' for a loss with one value per row"),
        (
            VALUE[:, :2],
            "tokens",
            r"value of shape \[3, 2\], expected one number per token \[3, 4\] or per row \[3\]",
        ),
        (torch.tensor(1.0), "tokens", r"value of shape \[\]"),
    ],
)
def test_incompatible_shapes_and_means_are_refused(value, mean, message):
    with pytest.raises(ValueError, match=message):
        weighted_sum(value, MASK, torch.ones(3).double(), mean)


@pytest.mark.parametrize("mean", ["token", 0, -1.0, float("nan")])
def test_an_unknown_mean_is_refused(mean):
    with pytest.raises(ValueError, match="update: found mean="):
        check_mean(mean)
