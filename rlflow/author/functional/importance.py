"""Weights for tokens that another policy sampled. A missing log-prob (NaN) under the mask stays missing."""

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
    """How much likelier the trainer's policy makes what was sampled, all [rows, T]; 1 outside the mask.

    "token": exp(logprobs - sampled_logprobs). "sequence": the product of a response's ratios at each of its
    tokens, unbiased but the further from 1 the longer the response. "geometric": their geometric mean, which
    has no such length in it and is biased.
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
    """The importance ratio, at most cap and at least floor; 1 outside the mask (truncated importance
    sampling, Yao et al. 2025)."""
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
    """The importance ratio within [low, high], 0 elsewhere; 1 outside the mask (IcePop, Ling Team 2025,
    "Every Step Evolves").

    A token of weight 0 teaches nothing and still counts in the divisor. ratio="sequence" or "geometric" drops
    whole responses.
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
    """The weights that there are, or 1, but 0 at responses whose KL from sampler to trainer is above
    ``limit`` nats; 1 outside the mask (rejection sampling against drift: Liu et al. 2025, "When Speed Kills
    Stability"; estimators: Schulman, "Approximating KL divergence").

    The KL of a response is the mean, sum or largest of its tokens' estimates; over="token" drops tokens by
    their own. Unlike a band of ratios (``masked_weights``), estimates that are never negative do not cancel
    out over a response.
    """
    drift = _drift(torch.where(mask, kl(sampled_logprobs, logprobs, estimator), 0.0), mask, over)
    passed = torch.ones_like(logprobs) if weights is None else weights
    passed = torch.where(drift.isnan(), torch.nan, torch.where(drift > limit, 0.0, passed))
    return torch.where(mask, passed, 1.0)


def _drift(estimates: Tensor, mask: Tensor, over: Over) -> Tensor:
    """The estimates per token [rows, T], which are 0 outside the mask, or the estimate of each response
    [rows, 1]."""
    if over == "token":
        return estimates
    if over == "max":
        return (
            estimates.amax(1, keepdim=True) if estimates.shape[1] else estimates.new_zeros(len(estimates), 1)
        )
    if over not in ("mean", "sum"):
        raise ValueError(f"rejected_weights: found over={over!r}, expected 'mean', 'sum', 'max' or 'token'")
    return (row_mean if over == "mean" else row_sum)(estimates, mask)[:, None]
