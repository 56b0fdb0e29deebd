"""Find the columns that change a loss's gradient, by calling the loss on synthetic rows.

Each loss is called on-policy and off-policy, with several random draws. A column counts as having no
influence only if all gradients stay the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlflow.author.columns import Kind, Level
from rlflow.author.loss import Loss
from rlflow.compiler.check.losses import column, model_quantities
from rlflow.training.objective import New

DRAWS = 3
SIZES = (0.1, 1.0, 30.0)  # amounts added to and subtracted from float columns
# these columns determine which entries count and which belong together, so they always have influence
FIXED = ("mask", "group")


def gradient(
    loss: Loss, new: New, columns: Mapping[str, Any], settings: Mapping[str, Any]
) -> dict[str, Tensor] | None:
    """Return the gradient of the sum of a loss's values, as model output → gradient.

    ``columns``: the values of the loss's columns. Returns None if the call tells nothing because the loss
    raises or a gradient isn't finite.
    """
    leaves = New(
        **{name: x if x is None else x.detach().clone().requires_grad_() for name, x in vars(new).items()}
    )
    wanted = {name: x for name, x in vars(leaves).items() if x is not None}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        try:
            value, _ = loss(leaves, *(columns.get(p.name) for p in loss.signature.columns), **settings)
            gradients = (
                torch.autograd.grad(value.double().sum(), list(wanted.values()), allow_unused=True)
                if value.requires_grad
                else ()
            )
        except Exception:  # compiler/check/losses.py reports exceptions of losses
            return None
    if not all(g is None or bool(g.isfinite().all()) for g in gradients):
        return None
    return {
        name: torch.zeros_like(x) if g is None else g
        for (name, x), g in zip(wanted.items(), gradients, strict=False)
    }


def influential(
    loss: Loss, kinds: Mapping[str, Kind] | None, settings: Mapping[str, Any], names: frozenset[str]
) -> frozenset[str]:
    """Return those columns in ``names`` that change the loss's gradient.

    ``kinds``: the kinds of the loss's columns. If it is None, or if the loss raises, all of ``names`` are
    returned.
    """
    if kinds is None:
        return names
    influences = names - kinds.keys() | {
        name for name in names & kinds.keys() if name in FIXED or kinds[name].level is Level.TEXT
    }
    for seed in range(DRAWS):
        for new, columns in trials(loss, kinds, seed):
            base = gradient(loss, new, columns, settings)
            if base is None:
                return names
            influences |= {
                name
                for name in names - influences
                if _changes_gradient(loss, new, columns, settings, name, base)
            }
    return frozenset(influences)


def has_gradient(loss: Loss, kinds: Mapping[str, Kind], settings: Mapping[str, Any]) -> bool:
    """Return True if the loss has a nonzero gradient on some synthetic rows, or can't be called."""
    for seed in range(DRAWS):
        for new, columns in trials(loss, kinds, seed):
            gradients = gradient(loss, new, columns, settings)
            if gradients is None or any(bool(g.any()) for g in gradients.values()):
                return True
    return False


def trials(loss: Loss, kinds: Mapping[str, Kind], seed: int) -> list[tuple[New, dict[str, Any]]]:
    """Make synthetic inputs for a loss: a list of (model outputs, columns).

    First, the model outputs are drawn independently of the columns. If the loss reads ``logprobs``, there is
    a second trial in which the model's log-probs equal this column.
    """
    rng = torch.Generator().manual_seed(seed)
    columns = {name: column(name, kind, rng) for name, kind in sorted(kinds.items())}
    new = model_quantities(loss, rng)
    before = columns.get("logprobs")
    if new.logprobs is None or not isinstance(before, Tensor) or before.shape != new.logprobs.shape:
        return [(new, columns)]
    return [(new, columns), (replace(new, logprobs=before), columns)]


def _changes_gradient(
    loss: Loss,
    new: New,
    columns: Mapping[str, Any],
    settings: Mapping[str, Any],
    name: str,
    base: Mapping[str, Tensor],
) -> bool:
    for other in moved(columns[name]):
        gradients = gradient(loss, new, {**columns, name: other}, settings)
        if gradients is None or any(not torch.equal(gradients[quantity], g) for quantity, g in base.items()):
            return True
    return False


def moved(value: Tensor) -> list[Tensor]:
    """Return several changed copies of a column's values.

    Floats are moved up and down by amounts that differ between entries. Bools are negated, all set to True,
    and all set to False. Integers are increased by 1.
    """
    if value.dtype is torch.bool:
        return [~value, torch.ones_like(value), torch.zeros_like(value)]
    if not value.is_floating_point():
        return [value + 1]
    uneven = torch.linspace(0.5, 1.5, max(value.numel(), 1)).reshape(value.shape).to(value.dtype)
    return [value + sign * size * uneven for size in SIZES for sign in (1, -1)]
