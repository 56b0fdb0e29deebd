"""Optimizer steps of an update on several ranks: which rows each rank uses in which step.

Neither the steps nor the rows in each step depend on the number of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.cluster.rpc.message import Index
from rlflow.cluster.sharding.split import balanced
from rlflow.training.learning import Passes, steps
from rlflow.training.loss_rows import WITH_GROUP, with_groups
from rlflow.training.minibatches import units_of
from rlflow.training.objective import Means

# tokens, rows and, with several losses, these numbers for each loss
StepTotals = tuple[int, int] | tuple[int, int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class RankSteps:
    """The rows that each rank uses in each optimizer step of an update."""

    rows: list[Tensor]  # the rows of the batch that each rank needs, ascending
    # for each rank and step: the places among the rank's rows, and the totals of the full minibatch for
    # ``MinibatchTotals``
    steps: list[list[tuple[Index, StepTotals]]]
    left_out: int  # number of rows that the update doesn't learn from


def rank_steps(
    facts: Tensor,
    by_group: bool,
    ranks: int,
    *,
    seed: int,
    epochs: int = 1,
    minibatch: int | None = None,
    mean: Means = "tokens",
) -> RankSteps:
    """Return each rank's rows in each optimizer step. Minibatches are split over the ranks by tokens.

    ``facts``: int64 [rows, 4 or more]. Its columns are: why the row is excluded from the update (0 if it
    isn't), the number of unmasked tokens, the number of all tokens, the group and, if there are several
    losses, whether each one uses the row. ``by_group``: whether the loss needs complete groups.
    """
    groups = numbered(facts[:, 3])
    bad = (with_groups(facts[:, 0], groups, WITH_GROUP) if by_group else facts[:, 0]) != 0
    good = (~bad).nonzero()[:, 0]
    units = units_of(numbered(groups[good]) if by_group else torch.arange(len(good)))
    counts, tokens, own = facts[good, 1], facts[good, 2], facts[good, 4:].bool()
    shares = [[] for _ in range(ranks)]  # type: list[list[tuple[Tensor, StepTotals]]]
    for step in steps(units, counts, Passes(epochs, minibatch, mean, seed), own if own.shape[1] else None):
        step_units = torch.cat(list(step.units))
        for rank, units_here in enumerate(_shared(step.units, tokens, ranks)):
            parts = (step.totals.parts,) if step.totals.parts else ()
            shares[rank].append((units_here, (step.totals.tokens, step.totals.rows, *parts)))
        assert len(step_units) == sum(len(each[-1][0]) for each in shares)
    rows = [torch.unique(torch.cat([part for part, _ in share] or [good[:0]])) for share in shares]
    local = [
        [(torch.searchsorted(own, part).numpy(), totals) for part, totals in share]
        for own, share in zip(rows, shares, strict=True)
    ]
    return RankSteps([good[own_rows] for own_rows in rows], local, int(bad.sum()))


def _shared(units: object, tokens: Tensor, ranks: int) -> list[Tensor]:
    """Split the units of a minibatch over ranks by tokens. Return each rank's rows in minibatch order."""
    listed = list(units)  # type: ignore[call-overload]
    flat = torch.cat(listed)
    place = torch.empty(int(flat.max()) + 1, dtype=torch.int64)
    place[flat] = torch.arange(len(flat))
    ends = torch.tensor([len(unit) for unit in listed]).cumsum(0).tolist()
    within = [torch.arange(end - len(unit), end) for end, unit in zip(ends, listed, strict=True)]
    return [flat[rows] for rows in balanced(within, tokens[flat], ranks)]


def numbered(values: Tensor) -> Tensor:
    """Number the groups of rows 0, 1, 2, … in row order. Adjacent rows with equal values form one group."""
    if not len(values):
        return values
    changes = torch.ones(len(values), dtype=torch.int64)
    changes[1:] = (values[1:] != values[:-1]).long()
    return changes.cumsum(0) - 1
