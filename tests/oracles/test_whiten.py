"""Means and whitening under a mask."""

from pathlib import Path

import torch

from rlflow import masked_mean, row_mean, whiten
from rlflow.author.load import load

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed = registry.as_is, registry.transformed


@as_is("verl-whiten-1", "verl-whiten-3", "verl-whiten-5")
def test_whiten(case):
    case.agrees(whitened=whiten(case.inputs["values"], case.mask) * case.mask)


@as_is("verl-maskedmean-nan")
def test_masked_means(case):
    values = case.inputs["values"]
    case.agrees(mean=masked_mean(values, case.mask), mean_rows=row_mean(values, case.mask))


def times(white, x, divisor):
    """Replace rlflow's divisor in ``white``, sqrt(unbiased variance of x + 1e-8), with ``divisor``."""
    return white * (x.var() + 1e-8).sqrt() / divisor


@transformed(
    "To whiten, the peer divides by the biased standard deviation + 1e-5, rlflow by sqrt(unbiased variance "
    "+ 1e-8)",
    "areal-norm-False",
)
def test_whiten_with_a_biased_deviation(case):
    values = case.inputs["values"]
    inside = values[case.mask]
    white = times(whiten(values, case.mask), inside, inside.std(unbiased=False) + 1e-5)
    case.agrees(normalized=white * case.mask)


@transformed(
    "The peer whitens each row separately and divides by the row's biased standard deviation; rlflow "
    "whitens the complete batch and divides by sqrt(unbiased variance + 1e-8)",
    "orlhf-norm-1",
)
def test_whiten_row_by_row(case):
    rows = []
    for x, inside in zip(case.inputs["values"], case.mask, strict=True):
        white = whiten(x[None], inside[None])[0]
        rows.append(
            times(white, x[inside], x[inside].std(unbiased=False)) * inside if inside.any() else white * 0
        )
    case.agrees(normalized=torch.stack(rows))
