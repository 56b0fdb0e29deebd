"""Metrics of an update. Each is the mean of its values, or their maximum if its name ends in ``_max``. NaN
counts as a missing value."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

# share of the adapters' learning that is lost when adapters are merged into weights with fewer bits
MERGE_ROUNDING = "merge_rounding"
OWN = (
    "loss",
    "grad_norm",
    "lr",
    "rows",
    "steps",
    "left_out",
    "skipped_steps",
    MERGE_ROUNDING,
    "funnel/tokens",
    "funnel/tokens_with_gradient",
    "funnel/tokens_effective",
    "funnel/tokens_clipped_above",
    "funnel/tokens_clipped_below",
    "funnel/moved",
)


class Meter:
    """Running totals of an update's metrics, kept on the device of the loss."""

    def __init__(self) -> None:
        self.totals: dict[str, Tensor] = {}

    def add(self, metrics: Mapping[str, Any], mask: Tensor, groups: int) -> None:
        """Add the metrics that a loss returned for a micro-batch.

        A metric has one value per token [rows, T], per row [rows] or per group [groups], or is a single
        number, which is weighted by the number of rows. mask: bool [rows, T]. Only tokens under the mask, and
        rows that have such tokens, count. groups: the number of groups, or 0.

        Raises ValueError for any other shape, and for a name in OWN, which the trainer reserves.
        """
        for name, value in metrics.items():
            if name in OWN:
                raise ValueError(
                    f"loss: the metric '{name}' is one of the trainer's own ({', '.join(OWN)}); choose "
                    "another name"
                )
            entries = _entries(name, torch.as_tensor(value, device=mask.device).detach(), mask, groups)
            new = _totals(entries, weight=mask.shape[0] if entries.dim() == 0 else 1)
            self.totals[name] = _joined(self.totals[name], new) if name in self.totals else new

    def observe(self, values: Mapping[str, Tensor], mask: Tensor) -> None:
        """Add the trainer's own measurements [rows, T], by name. Only tokens under ``mask``, bool [rows, T],
        count."""
        for name, value in values.items():
            new = _totals(value.detach()[mask].double(), weight=1)
            self.totals[name] = _joined(self.totals[name], new) if name in self.totals else new

    def result(self) -> dict[str, float]:
        """Return the metrics by name, as computed by ``reported``."""
        return reported(self.rank_totals())

    def rank_totals(self) -> dict[str, Totals]:
        """Return this rank's totals by name, as plain numbers that ``added`` can combine with those of other
        ranks."""
        return {name: tuple(totals.tolist()) for name, totals in self.totals.items()}


Totals = tuple[float, ...]  # sum, weight, maximum, number of missing values


def added(parts: Iterable[Mapping[str, Totals]]) -> dict[str, Totals]:
    """Combine the totals of all ranks, by name."""
    out: dict[str, Totals] = {}
    for part in parts:
        for name, new in part.items():
            old = out.get(name, (0.0, 0.0, -math.inf, 0.0))
            out[name] = (old[0] + new[0], old[1] + new[1], max(old[2], new[2]), old[3] + new[3])
    return out


def reported(totals: Mapping[str, Totals]) -> dict[str, float]:
    """Compute metrics from their totals, as means, or as maxima for names that end in ``_max``.

    If a metric has missing values, their number is reported as ``NAME_nan``. A metric without any value is
    left out.
    """
    out = {}
    for name, (total, weight, highest, missing) in totals.items():
        if weight:
            out[name] = highest if name.endswith("_max") else total / weight
        if missing:
            out[f"{name}_nan"] = missing
    return out


def _entries(name: str, value: Tensor, mask: Tensor, groups: int) -> Tensor:
    """Return the values that count for a metric as float64, flat, or 0-d if the metric is a single number.
    Raises ValueError for a shape that doesn't fit."""
    value = value.double()
    if value.dim() == 0:
        return value
    if value.shape == mask.shape:
        return value[mask]
    if value.shape == mask.shape[:1]:
        return value[mask.any(1)]
    if value.shape == (groups,):
        return value
    raise ValueError(
        f"loss: found metric '{name}' of shape {list(value.shape)}, expected one number per token "
        f"{list(mask.shape)}, row {list(mask.shape[:1])} or group [{groups}], or a single number"
    )


def _totals(entries: Tensor, weight: int) -> Tensor:
    """Return the totals of a metric's values, float64 [4]: sum, weight, maximum, and number of missing
    values."""
    present = ~entries.isnan()
    known = torch.where(present, entries, 0.0)
    lowest = torch.full((1,), -torch.inf, dtype=torch.float64, device=entries.device)
    highest = torch.cat([torch.where(present, entries, -torch.inf).reshape(-1), lowest]).amax()
    return torch.stack(
        [known.sum() * weight, present.sum().double() * weight, highest, (~present).sum().double()]
    )


def _joined(a: Tensor, b: Tensor) -> Tensor:
    summed = a + b
    summed[2] = torch.maximum(a[2], b[2])
    return summed
