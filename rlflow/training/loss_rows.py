"""Select the rows of a batch that a loss learns from, and number the groups of rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.author.batch import Batch, Data, missing_column
from rlflow.author.columns import Level
from rlflow.author.joint import JointLoss
from rlflow.author.loss import Loss
from rlflow.errors import FlowError

# marks of skipped rows: another row of the group is broken; no loss uses the row (``where``)
WITH_GROUP, NO_LOSS = -1, -2
MODEL_COLUMNS = ("prompt_tokens", "tokens", "mask")  # columns that every update reads


@dataclass(frozen=True)
class KeptRows:
    """The rows that an update learns from, and how many it skips."""

    batch: Batch
    left_out: int


def columns_read(batch: Batch, loss: Loss) -> tuple[str, ...]:
    """Return the names of the columns that an update with ``loss`` reads from ``batch``. Raises FlowError if
    a required one is missing."""
    parameters = loss.signature.columns
    needed = [*MODEL_COLUMNS, *(p.name for p in parameters if not p.optional)]
    for name in needed:
        if name not in batch:
            raise FlowError(missing_column(name, batch.columns))
    optional = [name for name in ("temperature", "group", *(p.name for p in parameters)) if name in batch]
    return tuple(dict.fromkeys([*needed, *optional]))


def learnable(batch: Batch, loss: Loss) -> KeptRows:
    """Select the rows for which all float columns read by the loss are finite.

    In token columns, only values under ``mask`` matter. If the loss takes whole groups, a single non-finite
    value excludes the whole group.
    """
    marks = broken_columns(batch, loss)
    if loss.rows == "group":
        marks = with_groups(marks, group_of(batch), WITH_GROUP)
    bad = marks != 0
    rows = batch.rows(~bad) if bool(bad.any()) else batch
    return KeptRows(rows.select(*columns_read(batch, loss)), int(bad.sum()))


def broken_columns(batch: Batch, loss: Loss) -> Tensor:
    """Return int64 [rows]: the number of the first column in which a row has a non-finite value, or 0 if all
    its values are finite. Only columns read by the loss are checked, and they are counted from 1.

    If ``loss`` combines several losses, each is checked only on the rows that it uses. A row that no loss
    uses gets NO_LOSS.
    """
    broken = torch.zeros(len(batch), dtype=torch.int64)
    if not isinstance(loss, JointLoss):
        return _first_broken(batch, loss, loss.signature.column_names, broken)
    own = own_rows(batch, loss)
    for part, rows in zip(loss.losses, own.unbind(1), strict=True):
        marks = _first_broken(batch, part, loss.signature.column_names, broken.clone())
        broken = torch.where(rows, marks, broken)
    return torch.where(own.any(1), broken, NO_LOSS)


def _first_broken(batch: Batch, loss: Loss, names: tuple[str, ...], broken: Tensor) -> Tensor:
    """Mark the rows with a non-finite value in one of the loss's columns, and return ``broken``, int64
    [rows], changed in place. Each row that was 0 gets the position in ``names`` (from 1) of its first such
    column."""
    for parameter in loss.signature.columns:
        if parameter.name in batch:
            broken[(broken == 0) & _broken(batch, batch.data[parameter.name])] = (
                names.index(parameter.name) + 1
            )
    return broken


def own_rows(batch: Batch, loss: JointLoss) -> Tensor:
    """Return which losses use which rows, bool [rows, losses]."""
    everything = torch.ones(len(batch), dtype=torch.bool)
    return torch.stack([everything if name is None else batch[name].bool() for name in loss.where], 1)


def with_groups(broken: Tensor, groups: Tensor, mark: int) -> Tensor:
    """Return ``broken`` with ``mark`` for each row that is 0 but shares a group with a marked row."""
    return torch.where((broken == 0) & whole_groups(broken > 0, groups), mark, broken)


def whole_groups(rows: Tensor, groups: Tensor) -> Tensor:
    """Return bool [rows], True for each row whose group has at least one row that is True in ``rows``.

    groups: int64 [rows], the number of each row's group, counted from 0.
    """
    return torch.bincount(groups, rows.double())[groups] > 0 if len(rows) else rows


def _broken(batch: Batch, column: Data) -> Tensor:
    """Return bool [rows], True where the column has a non-finite value. In token columns, only values under
    ``mask`` count."""
    none = torch.zeros(len(batch), dtype=torch.bool)
    if (
        not isinstance(column.value, Tensor)
        or not column.value.is_floating_point()
        or column.kind.level is Level.SCALAR
    ):
        return none
    broken = ~column.value.isfinite()
    if column.kind.level is Level.GROUP:
        return broken[batch.axis.slots]
    if not column.ragged:
        return broken
    if column.kind.level is Level.TOKEN:
        broken = broken & batch.data["mask"].value
    return _per_row(broken, column.row_lengths) > 0


def mask_counts(batch: Batch) -> Tensor:
    """Return the number of tokens under the mask in each row, int64 [rows]."""
    mask = batch.data["mask"]
    return _per_row(mask.value, mask.row_lengths).long()


def token_counts(batch: Batch) -> Tensor:
    """Return the number of prompt and response tokens in each row, int64 [rows]."""
    return batch.data["prompt_tokens"].row_lengths + batch.data["tokens"].row_lengths


def group_of(batch: Batch) -> Tensor:
    """Return the number of each row's group, counted from 0, int64 [rows].

    Adjacent rows with the same value in the column ``group`` form a group. If there is no such column, rows
    with the same position in the data stream form one.
    """
    if "group" not in batch:
        return batch.axis.slots
    group = batch.data["group"].value
    changes = torch.ones(len(group), dtype=torch.int64)
    changes[1:] = (group[1:] != group[:-1]).long()
    return changes.cumsum(0) - 1


def _per_row(flags: Tensor, lengths: Tensor) -> Tensor:
    rows = torch.arange(len(lengths)).repeat_interleave(lengths)
    return torch.bincount(rows, flags.double(), minlength=len(lengths))
