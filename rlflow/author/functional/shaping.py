"""Changes of scores that depend on how a response ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlflow.author.stage import stage


@stage(gives="scores")
def stop_penalty(scores: Tensor, finish: Sequence[str], *, coef: float) -> Tensor:
    """Return scores [rows] with a penalty for responses that were cut at their maximum length.

    finish: how each response ended. If coef is from 0 to 1, the score of a cut response is multiplied by
    coef, so a negative score rises. If coef is below 0, the score of a cut response becomes coef. Other
    responses keep their scores, and a missing score (NaN) stays missing. Raises ValueError for coef above 1.

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
