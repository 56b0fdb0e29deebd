"""How far one policy is from another."""

from __future__ import annotations

from typing import Literal

from torch import Tensor


def kl(logprobs: Tensor, ref_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(policy, reference) in nats, from tokens of the policy (Schulman, "Approximating KL divergence").

    With r = ref / policy: k1 = -log r; k2 = (log r)² / 2; k3 = r - 1 - log r. Charge k1 in the reward. As a loss k1 has no
    gradient in expectation, k2 has the right one on-policy, and k3 descends the forward KL.
    """
    log_ratio = ref_logprobs - logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    if estimator == "k3":
        return log_ratio.exp() - 1 - log_ratio
    raise ValueError(f"kl: found estimator {estimator!r}, expected 'k1', 'k2' or 'k3'")
