"""Importance weights, for training on tokens that were sampled by another policy.

If a token under the mask lacks a log-prob (NaN), its weight is NaN.
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
    """Return each token's importance ratio trainer / sampler, [rows, T]; 1 outside the mask.

    A "token" ratio is exp(logprobs - sampled_logprobs). With "sequence", every token gets the product of its
    response's token ratios, which is unbiased but strays further from 1 as responses get longer. With
    "geometric", it gets their geometric mean, which is biased but independent of the length. Raises
    ValueError for any other ratio.
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
    """Return the importance ratio where it is within [low, high], and 0 elsewhere: [rows, T].

    Outside the mask, weights are 1. ``ratio`` is as in ``importance_ratio``; "sequence" and "geometric" drop
    whole responses. A token of weight 0 adds no gradient, but still counts in the divisor of the loss.
    Source: IcePop (Ling Team 2025, "Every Step Evolves").
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
    """Set ``weights`` [rows, T] to 0 for responses whose estimated KL is above ``limit`` nats.

    ``weights`` defaults to all 1. Weights outside the mask are always 1. The KL is from the sampler to the
    trainer, and a response's KL is the mean, sum or maximum (``over``) of its tokens' estimates. With
    over="token", each token is judged, and dropped, by its own estimate. Estimates are never negative, so
    unlike the ratios of ``masked_weights`` they can't cancel out within a response.

    Sources: rejection sampling against drift (Liu et al. 2025, "When Speed Kills Stability"); estimators:
    Schulman, "Approximating KL divergence".
    """
    drift = _drift(torch.where(mask, kl(sampled_logprobs, logprobs, estimator), 0.0), mask, over)
    passed = torch.ones_like(logprobs) if weights is None else weights
    passed = torch.where(drift.isnan(), torch.nan, torch.where(drift > limit, 0.0, passed))
    return torch.where(mask, passed, 1.0)


def _drift(estimates: Tensor, mask: Tensor, over: Over) -> Tensor:
    """Combine the estimates as ``over`` says, into a KL per token [rows, T] or per response [rows, 1]."""
    if over == "token":
        return estimates
    if over == "max":
        return (
            estimates.amax(1, keepdim=True) if estimates.shape[1] else estimates.new_zeros(len(estimates), 1)
        )
    if over not in ("mean", "sum"):
        raise ValueError(f"rejected_weights: found over={over!r}, expected 'mean', 'sum', 'max' or 'token'")
    return (row_mean if over == "mean" else row_sum)(estimates, mask)[:, None]
