"""Scores changed by how a response ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.author.stage import stage


@stage(gives="scores")
def stop_penalty(scores: Tensor, finish: Sequence[str], *, coef: float) -> Tensor:
    """scores [rows] with a price for responses that were cut at their longest length (OpenRLHF's
    ``stop_properly_penalty_coef``; ProRL).

    coef from 0 to 1: such a response has coef times its score, so a score below 0 gets better. coef below 0:
    it has coef itself as its score, whatever it was. Other responses keep theirs, and a missing score (NaN)
    stays missing. Raises ValueError for coef above 1.
    """
    if not coef <= 1:
        raise ValueError(
            f"stop_penalty: found coef={coef}, expected a number of at most 1: a factor from 0 to 1, or "
            "a score below 0"
        )
    cut = torch.tensor([how == "length" for how in finish], dtype=torch.bool, device=scores.device)
    penalised = coef * scores if coef >= 0 else torch.where(scores.isnan(), scores, coef)
    return torch.where(cut, penalised, scores)
