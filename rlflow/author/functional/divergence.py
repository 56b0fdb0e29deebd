"""Measures of how far one policy is from another."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate KL(policy, reference) per token in nats, [rows, T], from tokens sampled by the policy.

    With r = exp(ref_logprobs - logprobs): k1 = -log r; k2 = (log r)² / 2; k3 = r - 1 - log r (Schulman,
    "Approximating KL divergence"). Use k1 in rewards. In a loss, the expected gradient is 0 for k1, that of
    the KL for k2 (if the policy sampled the tokens), and that of the forward KL for k3. Raises ValueError for
    any other estimator.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return log_ratio.exp() - 1 - log_ratio
    raise ValueError(f"kl: found estimator {estimator!r}, expected 'k1', 'k2' or 'k3'")


def kl_penalty(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    estimator: Literal["k2", "k3", "k3-weighted"],
) -> Tensor:
    """Return the KL to the reference per token in nats, [rows, T], for use in a loss.

    The tokens were sampled by the old policy. ``k2`` has the gradient of the KL as long as the policy equals
    the old one. ``k3`` (used by GRPO) has the gradient of the forward KL. ``k3-weighted``, which is k3 times
    the ratio policy / old, has the gradient of the KL for any policy (DeepSeek-V3.2, 2025). Raises ValueError
    for k1, whose expected gradient is 0.
    """
    if estimator == "k3-weighted":
        return (logprobs - old_logprobs).exp() * kl(logprobs, ref_logprobs, "k3")
    if estimator in ("k2", "k3"):
        return kl(logprobs, ref_logprobs, estimator)
    why = {"k1": "k1 has no gradient in expectation: use it in the reward"}.get(
        estimator, "choose one by its gradient"
    )
    raise ValueError(
        f"kl_penalty: found estimator {estimator!r}, expected 'k2', 'k3' or 'k3-weighted'; {why}"
    )


def adapted_beta(beta: Tensor, observed: Tensor, *, target: float, rate: float) -> Tensor:
    """Return the KL coefficient for the next iteration, 0-d.

    It is beta (1 + rate clip(observed / target - 1, -0.2, 0.2)), where beta (0-d) is the current coefficient,
    and observed and target are the measured and intended KL of whole responses, in nats. If observed is NaN,
    beta stays the same. Source: Ziegler et al. 2019, section 2.2.
    """
    error = torch.where(observed.isnan(), 0.0, observed / target - 1)
    return beta * (1 + rate * error.clamp(-0.2, 0.2))
