"""Score adjustments based on how a response ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.author.stage import stage


@stage(gives="scores")
def stop_penalty(scores: Tensor, finish: Sequence[str], *, coef: float) -> Tensor:
    """Penalise the scores [rows] of responses that were cut off at their maximum length.

    finish: how each response ended. A coef between 0 and 1 multiplies the score of a cut-off response, so a
    negative score rises. A coef below 0 replaces it. Other scores don't change, and missing ones (NaN) stay
    missing. Raises ValueError if coef is above 1.

    Source: OpenRLHF's ``stop_properly_penalty_coef``; ProRL.
    """
    if not coef <= 1:
        raise ValueError(
            f"stop_penalty: found coef={coef}, expected a number of at most 1: a factor from 0 to 1, or "
            "a score below 0"
        )
    cut = torch.tensor([how == "length" for how in finish], dtype=torch.bool, device=scores.device)
    penalised = coef * scores if coef >= 0 else torch.where(scores.isnan(), scores, coef)
    return torch.where(cut, penalised, scores)
