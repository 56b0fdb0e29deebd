"""Several losses in one optimizer step: ``update(batch, (policy, likelihood), scale=…, mean=…, where=…)``."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rlflow.author.columns import row
from rlflow.author.loss import Loss, Quantity
from rlflow.author.methods import JOINT, UPDATE, Setting
from rlflow.author.signature import REQUIRED, ColumnParameter, Signature
from rlflow.errors import Place, Problem


@dataclass(frozen=True)
class LossTerm:
    """One of the losses in an optimizer step.

    It adds ``scale`` times its average over the rows selected by ``where`` to the objective.
    """

    loss: Loss
    settings: Mapping[str, Any]  # settings of the loss
    mean: Any  # how its values are averaged: "tokens", "rows", "row-tokens" or a number
    scale: float = 1.0
    where: str | None = None  # bool column that selects the loss's rows; None: all rows
    prefix: str = ""  # prefix of its metrics' names


class JointLoss(Loss):
    """Several losses that share a forward pass and an optimizer step.

    It reads the columns of all its losses, plus the ``where`` columns that select each loss's rows.
    """

    def __init__(self, losses: Sequence[Loss], scale: Sequence[float], where: Sequence[str | None]) -> None:
        new = dict.fromkeys(quantity for loss in losses for quantity in loss.new)
        first: Quantity = (
            "logprobs" if losses[0].head == "logprobs" and "logprobs" in new else losses[0].new[0]
        )
        super().__init__(
            losses[0].function,
            (first, *(quantity for quantity in new if quantity != first)),
            "group" if any(loss.rows == "group" for loss in losses) else "row",
        )
        vars(self).update(losses=tuple(losses), scale=tuple(map(float, scale)), where=tuple(where))

    losses: tuple[Loss, ...]
    scale: tuple[float, ...]
    where: tuple[str | None, ...]

    @property
    def name(self) -> str:
        """The names of all losses, joined with " + "."""
        return " + ".join(loss.name for loss in self.losses)

    @property
    def key(self) -> Hashable:
        """A key for comparing losses.

        Two joint losses have the same key if they have the same losses in the same order, and the same
        ``scale`` and ``where``.
        """
        return (*(loss.key for loss in self.losses), self.scale, self.where)

    @cached_property
    def signature(self) -> Signature:
        """The columns and settings of all losses.

        A setting for which two losses have different defaults has no default, so the call must pass it.
        """
        columns: dict[str, ColumnParameter] = {}
        for parameter in (parameter for loss in self.losses for parameter in loss.signature.columns):
            known = columns.setdefault(parameter.name, parameter)
            columns[parameter.name] = ColumnParameter(
                parameter.name, known.kind or parameter.kind, known.optional and parameter.optional
            )
        for name in self.where:
            if name is not None and (name not in columns or columns[name].optional):
                columns[name] = ColumnParameter(name, row("bool"), False)
        settings: dict[str, Any] = {}
        for name, default in (
            (name, default) for loss in self.losses for name, default in loss.signature.settings.items()
        ):
            settings[name] = default if settings.get(name, default) == default else REQUIRED
        hints = {name: hint for loss in self.losses for name, hint in loss.signature.types.items()}
        return Signature(
            tuple(columns.values()),
            settings,
            any(loss.signature.open_settings for loss in self.losses),
            hints,
        )

    @property
    def place(self) -> Place:
        """The file and line where the first loss is defined."""
        return self.losses[0].place

    @property
    def digest(self) -> str:
        """Identifies the code of all losses."""
        return hashlib.sha256(" ".join(loss.digest for loss in self.losses).encode()).hexdigest()[
            : len(self.losses[0].digest)
        ]


def terms(loss: Loss, settings: Mapping[str, Any], mean: Any) -> list[LossTerm]:
    """Split the loss of an optimizer step into single losses, each with its own settings and average.

    A single loss gives a list of one.
    """
    if not isinstance(loss, JointLoss):
        return [LossTerm(loss, settings, mean)]
    prefixes: list[str] = []
    for part in loss.losses:
        count = sum(known.partition("#")[0].rstrip("/") == part.name for known in prefixes)
        prefixes.append(f"{part.name}/" if not count else f"{part.name}#{count + 1}/")
    means = (mean,) * len(loss.losses) if not isinstance(mean, tuple) else mean
    own = [
        {
            name: value
            for name, value in settings.items()
            if name in part.signature.settings or part.signature.open_settings
        }
        for part in loss.losses
    ]
    return [
        LossTerm(*term)
        for term in zip(loss.losses, own, means, loss.scale, loss.where, prefixes, strict=True)
    ]


def specification(loss: Loss | Sequence[Loss]) -> Mapping[str, Setting]:
    """Return the settings of `update` itself. There are more of them for several losses than for one."""
    return UPDATE if isinstance(loss, Loss) and not isinstance(loss, JointLoss) else JOINT


def joined(
    what: str, losses: Sequence[Loss], settings: Mapping[str, Any], place: Place | None
) -> tuple[Loss, list[Problem]]:
    """Join the losses of an `update` call into one, and return it with the problems found.

    It is a problem if the losses clash, or if ``scale``, ``mean`` or ``where`` doesn't have exactly one value
    per loss; the default is then used instead. ``what`` names the call in messages.
    """
    problems, count = list(_clashes(what, losses, place)), len(losses)
    sound = {}
    for name in ("scale", "where", "mean"):
        value = settings.get(name)
        if (
            value is None
            or not JOINT[name].test(value)
            or (name == "mean" and not isinstance(value, tuple | list))
        ):
            continue  # absent, one average for all losses, or reported with the call's other settings
        if len(value) == count:
            sound[name] = value
        else:
            problems.append(
                Problem(
                    "joint-losses",
                    f"{what} needs one {name} for each of its {count} losses",
                    place,
                    found=f"{name}={value!r}",
                    expected=f"a tuple of {count}",
                    remedy=f"write {name}=({', '.join(['…'] * count)})",
                )
            )
    return JointLoss(
        losses, sound.get("scale", (1.0,) * count), sound.get("where", (None,) * count)
    ), problems


def _clashes(what: str, losses: Sequence[Loss], place: Place | None) -> Iterator[Problem]:
    """Yield a problem if the losses need different heads, or if one uses a setting name of `update`."""
    heads = {loss.head: loss for loss in losses}
    if len(heads) > 1:
        yield Problem(
            "two-heads",
            f"{what} has losses of {len(heads)} heads in one step",
            place,
            [*heads.values()][1].place,
            found=", ".join(f"'{loss.name}' uses {head}" for head, loss in heads.items()),
            expected="losses that use one head",
            remedy="use two roles, each with its own update",
        )
    for loss, name in (
        (loss, name)
        for loss in losses
        for name in JOINT
        if name not in UPDATE and name in loss.signature.settings
    ):
        yield Problem(
            "joint-losses",
            f"{what} uses {name}= itself, so loss '{loss.name}' cannot have a setting of that name",
            place,
            loss.place,
            found=f"a setting '{name}'",
            expected="another name",
            remedy=f"rename the setting in '{loss.name}'",
        )
