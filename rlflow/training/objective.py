"""The number that is minimised: a loss's values, averaged over a whole minibatch that may be computed in
pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Mean = Literal["tokens", "rows", "row-tokens"] | float
Means = Mean | tuple[Mean, ...]  # of one loss, or of each of several in one step


@dataclass(frozen=True)
class New:
    """The quantities that the model computes for a loss; None for one that was not asked for."""

    logprobs: Tensor | None = None  # [rows, T]
    entropy: Tensor | None = None  # [rows, T]
    values: Tensor | None = None  # [rows, T]
    scores: Tensor | None = None  # [rows]

    def rows(self, index: Tensor, width: int) -> New:
        """The quantities of some rows, int64 [n], whose tokens fit into ``width``."""
        return New(
            **{
                name: None if x is None else x[index, :width] if x.dim() == 2 else x[index]
                for name, x in vars(self).items()
            }
        )


@dataclass(frozen=True)
class MinibatchTotals:
    """Counts over a whole minibatch and all ranks. Every divisor comes from tokens and rows, or, where a step
    has several losses, from those of each one's own rows."""

    tokens: int  # that count
    rows: int  # that have any
    parts: tuple[tuple[int, int], ...] = ()  # (tokens, rows) by loss, where there are several

    @staticmethod
    def of(counts: Tensor, own: Tensor | None = None) -> MinibatchTotals:
        """The totals from ``counts``, int64 [rows]: tokens of each row that count. own: bool [rows, losses],
        the rows of each loss."""
        parts = [_totals(counts * rows) for rows in own.unbind(1)] if own is not None else []
        return MinibatchTotals(*_totals(counts), tuple(parts))

    def of_loss(self, number: int) -> MinibatchTotals:
        """The totals of the rows of one loss."""
        return MinibatchTotals(*self.parts[number]) if self.parts else self


def _totals(counts: Tensor) -> tuple[int, int]:
    return int(counts.sum()), int((counts > 0).sum())


def row_weights(counts: Tensor, mean: Mean, totals: MinibatchTotals) -> Tensor:
    """float64 [rows]: what one value of each row weighs in the objective.

    counts: int64 [rows], tokens of each row that count. Rows with none weigh 0 and are in no divisor.
    """
    present = (counts > 0).double()
    if mean == "tokens":
        return present / max(totals.tokens, 1)
    if mean == "row-tokens":
        return present / counts.clamp(min=1) / max(totals.rows, 1)
    if mean == "rows":
        return present / max(totals.rows, 1)
    return present / (max(totals.rows, 1) * float(mean))


def weighted_sum(value: Tensor, mask: Tensor, weights: Tensor, mean: Mean) -> Tensor:
    """The share of these rows in the objective, 0-d float64.

    value: [rows, T] or [rows], as a loss returned it; mask: bool [rows, T]; weights: float64 [rows] from
    ``row_weights``. Raises ValueError where the shape of the value and ``mean`` do not go together.
    """
    check_shape(value, mask, mean)
    inside = mask if value.dim() == 2 else weights > 0
    each = weights[:, None] if value.dim() == 2 else weights
    return (torch.where(inside, value, 0.0).double() * each).sum()


def check_mean(mean: Means) -> None:
    """Raises ValueError for what is no way to average."""
    if isinstance(mean, tuple):
        for each in mean:
            check_mean(each)
        return
    if isinstance(mean, str) and mean not in ("tokens", "rows", "row-tokens"):
        raise ValueError(f"update: found mean={mean!r}, expected 'tokens', 'rows', 'row-tokens' or a number")
    if not isinstance(mean, str) and not mean > 0:
        raise ValueError(f"update: found mean={mean!r}, expected a number above 0")


def check_shape(value: Tensor, mask: Tensor, mean: Mean) -> None:
    """Per-row values take mean='rows' or a number, per-token values any but 'rows'. Raises ValueError."""
    if value.shape not in (mask.shape, mask.shape[:1]):
        raise ValueError(
            f"loss: found a value of shape {list(value.shape)}, expected one number per token "
            f"{list(mask.shape)} or per row {list(mask.shape[:1])}"
        )
    level, fitting = ("token", ("tokens", "row-tokens")) if value.dim() == 2 else ("row", ("rows",))
    if isinstance(mean, str) and mean not in fitting:
        raise ValueError(
            f"update: found mean={mean!r} for a loss with one value per {level}, expected "
            f"{' or '.join(map(repr, fitting))} or a number"
        )
