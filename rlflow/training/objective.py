"""The objective that an update minimises: loss values averaged over a whole minibatch. Computing the
minibatch in pieces gives the same result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Mean = Literal["tokens", "rows", "row-tokens"] | float
Means = Mean | tuple[Mean, ...]  # for one loss, or for each of several losses in a step


@dataclass(frozen=True)
class New:
    """What the model computes for a loss. Quantities that the loss doesn't use are None."""

    logprobs: Tensor | None = None  # [rows, T]
    entropy: Tensor | None = None  # [rows, T]
    values: Tensor | None = None  # [rows, T]
    scores: Tensor | None = None  # [rows]

    def rows(self, index: Tensor, width: int) -> New:
        """Return the quantities of the rows with these indices, int64 [n], with per-token quantities cut to
        ``width`` tokens."""
        return New(
            **{
                name: None if x is None else x[index, :width] if x.dim() == 2 else x[index]
                for name, x in vars(self).items()
            }
        )


@dataclass(frozen=True)
class MinibatchTotals:
    """Token and row counts of a whole minibatch over all ranks, from which the objective's divisors follow.
    Each loss has counts of its own if there are several."""

    tokens: int  # tokens under the mask
    rows: int  # rows with at least one token under the mask
    parts: tuple[tuple[int, int], ...] = ()  # (tokens, rows) per loss; () with a single loss

    @staticmethod
    def of(counts: Tensor, own: Tensor | None = None) -> MinibatchTotals:
        """Compute a minibatch's totals.

        counts: int64 [rows], the number of tokens under the mask in each row. own: bool [rows, losses], which
        losses use which rows, or None if there's only one loss.
        """
        parts = [_totals(counts * rows) for rows in own.unbind(1)] if own is not None else []
        return MinibatchTotals(*_totals(counts), tuple(parts))

    def of_loss(self, number: int) -> MinibatchTotals:
        """Return the totals of the rows used by the loss with this number."""
        return MinibatchTotals(*self.parts[number]) if self.parts else self


def _totals(counts: Tensor) -> tuple[int, int]:
    return int(counts.sum()), int((counts > 0).sum())


def row_weights(counts: Tensor, mean: Mean, totals: MinibatchTotals) -> Tensor:
    """Return the factor by which each loss value of a row is multiplied in the objective, float64 [rows].

    counts: int64 [rows], the number of tokens under the mask in each row. mean: how the loss is averaged. A
    row without any token under the mask gets 0 and isn't counted in any divisor.
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
    """Return what these rows contribute to the objective, as 0-d float64.

    value: the loss values, [rows, T] or [rows]. mask: bool [rows, T]. weights: float64 [rows], from
    ``row_weights``. Raises ValueError if ``mean`` doesn't fit the shape of ``value``.
    """
    check_shape(value, mask, mean)
    inside = mask if value.dim() == 2 else weights > 0
    each = weights[:, None] if value.dim() == 2 else weights
    return (torch.where(inside, value, 0.0).double() * each).sum()


def check_mean(mean: Means) -> None:
    """Raise ValueError unless ``mean`` is the name of an average or a number above 0. In a tuple, each item
    is checked."""
    if isinstance(mean, tuple):
        for each in mean:
            check_mean(each)
        return
    if isinstance(mean, str) and mean not in ("tokens", "rows", "row-tokens"):
        raise ValueError(f"update: found mean={mean!r}, expected 'tokens', 'rows', 'row-tokens' or a number")
    if not isinstance(mean, str) and not mean > 0:
        raise ValueError(f"update: found mean={mean!r}, expected a number above 0")


def check_shape(value: Tensor, mask: Tensor, mean: Mean) -> None:
    """Raise ValueError if ``mean`` doesn't fit the shape of a loss value. Values per row, [rows], need 'rows'
    or a number; values per token, [rows, T], need 'tokens', 'row-tokens' or a number."""
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
