"""Scores changed by how a response ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.author.stage import stage


@stage(gives="scores")
def stop_penalty(scores: Tensor, finish: Sequence[str], *, coef: float) -> Tensor:
    """scores [rows] of responses that were cut at their longest length, times coef; others as they are (OpenRLHF's
    ``stop_properly_penalty_coef``). Meant for scores of at least 0: with coef < 1 a negative one gets better."""
    cut = torch.tensor([how == "length" for how in finish], dtype=torch.bool, device=scores.device)
    return torch.where(cut, coef * scores, scores)
