"""Importance weights for tokens that a policy other than the trained one sampled.

If a log-prob under the mask is missing (NaN), its weight is NaN.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlflow.author.functional.divergence import kl
from rlflow.author.functional.statistics import row_mean, row_sum
from rlflow.author.stage import stage

Ratio = Literal["token", "sequence", "geometric"]
Over = Literal["mean", "sum", "max", "token"]


def importance_ratio(
    logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, ratio: Ratio = "token"
) -> Tensor:
    """Return the importance ratio of each token, trainer / sampler, [rows, T]; 1 outside the mask.

    "token": exp(logprobs - sampled_logprobs). "sequence": each token gets the product of its response's token
    ratios, which is unbiased, but further from 1 for longer responses. "geometric": each token gets the
    geometric mean of its response's token ratios, which is biased, but does not grow with the length. Raises
    ValueError for another ratio.
    """
    log_ratio = torch.where(mask, logprobs - sampled_logprobs, 0.0)
    if ratio == "token":
        return log_ratio.exp()
    if ratio not in ("sequence", "geometric"):
        raise ValueError(
            f"importance_ratio: found ratio={ratio!r}, expected 'token', 'sequence' or 'geometric'"
        )
    over = row_sum if ratio == "sequence" else row_mean
    return torch.where(mask, over(log_ratio, mask)[:, None], 0.0).exp()


@stage(gives="weights")
def truncated_weights(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    mask: Tensor,
    *,
    cap: float,
    floor: float = 0.0,
    ratio: Ratio = "token",
) -> Tensor:
    """Return the importance ratio clamped to [floor, cap], [rows, T]; 1 outside the mask.

    ``ratio``: as in ``importance_ratio``. Source: truncated importance sampling (Yao et al. 2025).
    """
    return torch.where(mask, importance_ratio(logprobs, sampled_logprobs, mask, ratio).clamp(floor, cap), 1.0)


@stage(gives="weights")
def masked_weights(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    ratio: Ratio = "token",
) -> Tensor:
    """Return the importance ratio if it is within [low, high], else 0, [rows, T]; 1 outside the mask.

    ``ratio``: as in ``importance_ratio``; "sequence" and "geometric" drop complete responses. A token of
    weight 0 adds no gradient, but still counts in the divisor of the loss. Source: IcePop (Ling Team 2025,
    "Every Step Evolves").
    """
    weights = importance_ratio(logprobs, sampled_logprobs, mask, ratio)
    return torch.where(mask & ((weights < low) | (weights > high)), 0.0, weights)


@stage(gives="weights")
def rejected_weights(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    mask: Tensor,
    weights: Tensor | None = None,
    *,
    limit: float,
    estimator: Literal["k2", "k3"] = "k3",
    over: Over = "mean",
) -> Tensor:
    """Return ``weights`` [rows, T] with 0 at responses whose estimated KL is above ``limit`` nats.

    All weights outside the mask are 1. If ``weights`` is None, all weights are 1. The KL is from the sampler
    to the trainer. The KL of a response is the mean, sum or maximum (``over``) of its tokens' estimates. With
    over="token", single tokens are dropped by their own estimate. The estimates are never negative, so they
    cannot cancel out within a response, unlike the ratios of ``masked_weights``.

    Sources: rejection sampling against drift (Liu et al. 2025, "When Speed Kills Stability"); estimators:
    Schulman, "Approximating KL divergence".
    """
    drift = _drift(torch.where(mask, kl(sampled_logprobs, logprobs, estimator), 0.0), mask, over)
    passed = torch.ones_like(logprobs) if weights is None else weights
    passed = torch.where(drift.isnan(), torch.nan, torch.where(drift > limit, 0.0, passed))
    return torch.where(mask, passed, 1.0)


def _drift(estimates: Tensor, mask: Tensor, over: Over) -> Tensor:
    """Combine the estimates as ``over`` says: return the KL per token [rows, T], or per response [rows, 1]."""
    if over == "token":
        return estimates
    if over == "max":
        return (
            estimates.amax(1, keepdim=True) if estimates.shape[1] else estimates.new_zeros(len(estimates), 1)
        )
    if over not in ("mean", "sum"):
        raise ValueError(f"rejected_weights: found over={over!r}, expected 'mean', 'sum', 'max' or 'token'")
    return (row_mean if over == "mean" else row_sum)(estimates, mask)[:, None]
