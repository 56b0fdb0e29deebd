"""Statistics over the rows of a group. NaN means a missing value, which is skipped and never counts as 0."""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

import torch
from torch import Tensor

from rlflow.author.functional.statistics import like
from rlflow.author.stage import stage


@stage(gives="advantages", rows="group")
def compare(scores: Tensor, group: Tensor, mask: Tensor, *, deviation: bool = True) -> Tensor:
    """Return GRPO's advantages [rows, T]: (score - group mean) / (group standard deviation + 1e-4).

    scores and group are [rows]. Tokens under the mask get their row's advantage, and others get 0 (Shao et
    al. 2024, section 4.1.2). With ``deviation=False``, there is no division (Liu et al. 2025; Dr. GRPO).

    If all scores of a group are equal, its advantages are exactly 0. A row without a score (NaN) gets NaN,
    which makes the update skip it.
    """
    advantage = scores - group_mean(scores, group)
    if deviation:
        advantage = advantage / (group_std(scores, group) + 1e-4)
    return torch.where(mask, advantage[:, None], 0.0)


@stage(gives="advantages", rows="group")
def pass_at_k(scores: Tensor, group: Tensor, mask: Tensor, *, k: int) -> Tensor:
    """Return advantages [rows, T] that maximise the expected best score of k responses.

    If scores are 0 or 1, that's pass@k. A response's advantage is how much it raises the best score when
    added to k - 1 other responses of its group, averaged over all choices of these. Tokens outside the mask
    get 0. k times the mean over rows is an unbiased gradient (Walder and Karkhanis 2025, "Pass@K Policy
    Optimization").

    If a group has fewer than k scores, each response is compared with all the others. A row without a score
    (NaN) is skipped. Raises ValueError if k is below 2.
    """
    if k < 2:
        raise ValueError(
            f"pass_at_k: found k={k}, expected at least 2; `compare` gives the advantages of single responses"
        )
    gains = torch.full(scores.shape, torch.nan, dtype=torch.float64, device=scores.device)
    for number in torch.unique(group):
        rows = (group == number) & ~scores.isnan()
        gains[rows] = _added_to_best(scores[rows].double(), k)
    return torch.where(mask, like(scores, gains)[:, None], 0.0)


def _added_to_best(scores: Tensor, k: int) -> Tensor:
    """For each of n scores, return how much it raises the best of k - 1 others on average, float64 [n].

    The average is over all choices of k - 1 other scores, or just over all others if there are fewer.
    """
    n = len(scores)
    k = min(k, n)
    ordered, order = scores.sort(stable=True)
    # shares[m]: for a score that ranks above m, the share of its choices of k - 1 others whose best score has
    # rank m. The other k - 2 scores of such a choice are among the m scores below rank m.
    shares = [comb(m, k - 2) / comb(n - 1, k - 1) for m in range(n)] if n > 1 else [0.0] * n
    lead = (ordered[:, None] - ordered[None, :]).tril(-1)
    gains = torch.zeros_like(scores)
    gains[order] = lead @ torch.tensor(shares, dtype=torch.float64, device=scores.device)
    return gains


def group_mean(x: Tensor, group: Tensor) -> Tensor:
    """Return the mean of x over each row's group, [rows].

    NaNs are skipped, and a group with nothing else gives NaN. The mean of equal values is exact.
    """
    return like(x, _means(_totals(x.double(), group)))


def group_std(x: Tensor, group: Tensor) -> Tensor:
    """Return the standard deviation (divisor n - 1) of x over each row's group, [rows].

    NaNs are skipped. It is exactly 0 for groups of one row and for groups of equal values.
    """
    totals = _totals(x.double(), group)
    squares = _totals((x.double() - _means(totals)).square(), group).total
    deviation = (squares / (totals.count - 1).clamp(min=1)).sqrt()
    return like(x, torch.where(totals.low == totals.high, 0.0, deviation)[totals.slots])


def leave_one_out(x: Tensor, group: Tensor) -> Tensor:
    """For each row, return the mean of x over the other rows of its group, [rows] (Kool et al. 2019; RLOO).

    NaNs are skipped. If there are no other rows, the mean is NaN.
    """
    totals = _totals(x.double(), group)
    present = ~x.isnan()
    others = totals.count[totals.slots] - present.double()
    mean = (totals.total[totals.slots] - torch.where(present, x.double(), 0.0)) / torch.where(
        others > 0, others, torch.nan
    )
    return like(x, _between(mean, totals))


def length_weighted_mean(x: Tensor, lengths: Tensor, group: Tensor) -> Tensor:
    """Return sum(lengths x) / sum(lengths) over each row's group, [rows] (Hao et al. 2025; OPO).

    Rows where x is NaN are skipped.
    """
    there = torch.where(x.isnan(), 0, lengths).double()
    total, weight = _totals(torch.where(x.isnan(), 0.0, x.double()) * there, group), _totals(there, group)
    return like(x, _between((total.total / weight.total)[total.slots], _totals(x.double(), group)))


@dataclass(frozen=True)
class _Totals:
    """Sum, count, minimum and maximum of the non-NaN values of each group, float64 [groups].

    ``slots`` is each row's group.
    """

    total: Tensor
    count: Tensor
    low: Tensor
    high: Tensor
    slots: Tensor


def _totals(x: Tensor, group: Tensor) -> _Totals:
    _, slots = torch.unique(group, return_inverse=True)
    groups = int(slots.max()) + 1 if len(slots) else 0
    missing = x.isnan()

    def over(start: float, reduce: str, values: Tensor) -> Tensor:
        return torch.full((groups,), start, dtype=torch.float64, device=x.device).scatter_reduce(
            0, slots, values, reduce
        )

    low, high = (
        over(torch.inf, "amin", x.masked_fill(missing, torch.inf)),
        over(-torch.inf, "amax", x.masked_fill(missing, -torch.inf)),
    )
    return _Totals(
        over(0, "sum", x.masked_fill(missing, 0.0)), over(0, "sum", (~missing).double()), low, high, slots
    )


def _means(totals: _Totals) -> Tensor:
    """Return the mean of each row's group, [rows]."""
    return _between((totals.total / totals.count)[totals.slots], totals)


def _between(mean: Tensor, totals: _Totals) -> Tensor:
    """Clamp each mean to the range of its group's values, so the mean of equal values is exact.

    NaN stays NaN.
    """
    low, high = totals.low[totals.slots], totals.high[totals.slots]
    return torch.where(mean.isnan(), mean, mean.clamp(low, high))
