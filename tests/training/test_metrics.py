"""Means, maxima and missing values of metrics."""

import pytest
import torch

from rlflow.training.metrics import Meter, added, reported

MASK = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]], dtype=torch.bool)


def test_each_level_has_its_own_mean():
    meter = Meter()
    meter.add(
        {
            "per_token": torch.tensor([[1.0, 2.0, 99.0], [6.0, torch.nan, 99.0], [99.0] * 3]),
            "per_row": torch.tensor([1.0, 2.0, 99.0]),
            "per_group": torch.tensor([1.0, 4.0]),
            "flag": MASK & torch.tensor([True, False, False]),
            "number": 5,
        },
        MASK,
        groups=2,
    )
    assert meter.result() == pytest.approx(
        {"per_token": 3.0, "per_row": 1.5, "per_group": 2.5, "flag": 2 / 3, "number": 5.0}
    )


def test_micro_batches_add_up_to_the_mean_over_all_tokens():
    meter = Meter()
    for part in ([0], [1, 2]):
        meter.add(
            {"x": torch.tensor([[1.0, 2.0, 0.0], [6.0, 0.0, 0.0], [0.0] * 3])[part], "n": float(len(part))},
            MASK[part],
            groups=0,
        )
    assert meter.result() == pytest.approx({"x": 3.0, "n": 5 / 3})  # a number counts once per row


def test_missing_values_are_skipped_and_counted():
    meter = Meter()
    meter.add(
        {"x": torch.tensor([torch.nan, 2.0, torch.nan]), "all_max": torch.full((3, 3), torch.nan)},
        MASK,
        groups=0,
    )
    assert meter.result() == {"x": 2.0, "x_nan": 1.0, "all_max_nan": 3.0}


def test_names_in_max_are_maxima():
    meter = Meter()
    meter.add({"x_max": torch.tensor([[-3.0, -2.0, 9.0], [-8.0, 9.0, 9.0], [9.0] * 3])}, MASK, groups=0)
    meter.add({"x_max": torch.tensor([[-5.0]])}, torch.tensor([[True]]), groups=0)
    assert meter.result() == {"x_max": -2.0}


def test_metrics_of_several_ranks_equal_those_of_one():
    """Sums add up, maxima take the highest value, missing values are counted, and a name of a single rank
    counts.
    """
    values = torch.tensor([[1.0, 2.0, 9.0], [6.0, torch.nan, 9.0], [-4.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    one, ranks = Meter(), [Meter(), Meter(), Meter()]
    one.add({"x": values, "x_max": values, "low_max": -values.abs() - 1}, mask, groups=0)
    for rank, rows in zip(ranks, ([0], [1, 2], []), strict=True):
        part = values[rows]
        rank.add({"x": part, "x_max": part, "low_max": -part.abs() - 1}, mask[rows], groups=0)
    ranks[1].add({"alone": 3.0}, mask[:2], groups=0)
    found = reported(added(rank.rank_totals() for rank in ranks))
    assert found == {**one.result(), "alone": 3.0}
    assert (found["x_max"], found["low_max"], found["x"], found["x_nan"]) == (6.0, -2.0, 1.25, 1.0)


def test_a_metric_that_requires_grad_keeps_no_graph():
    meter = Meter()
    meter.add({"x": torch.ones(3, 3, requires_grad=True)}, MASK, groups=0)
    assert not meter.totals["x"].requires_grad


def test_other_shapes_and_reserved_names_are_refused():
    with pytest.raises(
        ValueError, match=r"metric 'x' of shape \[7\], expected one number per token \[3, 3\]"
    ):
        Meter().add({"x": torch.zeros(7)}, MASK, groups=0)
    with pytest.raises(ValueError, match="'grad_norm' is one of the trainer's own"):
        Meter().add({"grad_norm": 1.0}, MASK, groups=0)
