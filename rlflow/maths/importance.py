"""Weights for tokens that another policy sampled."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.author.stage import stage


@stage(gives="weights")
def truncated_weights(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """min(exp(logprobs - sampled_logprobs), cap) per token, 1 outside the mask (truncated importance sampling, Yao et al. 2025)."""
    log_ratio = torch.where(mask, logprobs - sampled_logprobs, 0.0)
    return log_ratio.exp().clamp(max=cap)
