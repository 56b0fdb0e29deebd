"""Gradients of an update's losses with respect to the model's outputs (log-probs, values or scores).

They show how much more likely the update makes each row's tokens. Computing them takes the model's outputs
but not its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.author.joint import JointLoss
from rlflow.execution.computed import with_numbers
from rlflow.runs.proof.dry_run import RecordedUpdate
from rlflow.training.learning import loss_columns, only_masked
from rlflow.training.loss_rows import learnable, mask_counts, own_rows
from rlflow.training.objective import MinibatchTotals, New, row_weights, weighted_sum

Row = tuple[tuple[int, ...], tuple[int, ...]]  # token ids of the prompt and of the response


@dataclass(frozen=True)
class Direction:
    """The gradient direction of an update: minus the gradient of its objective, for each model output.

    It covers the rows that the update learns from.
    """

    rows: Batch  # the trainable rows, with their columns
    by: Mapping[str, Tensor]  # output of the model → direction [rows, T] or [rows]

    @property
    def main(self) -> Tensor:
        """The direction for the first model output that the loss names: log-probs, values or scores."""
        return next(iter(self.by.values()))

    @property
    def of_rows(self) -> Tensor:
        """Each row's gradient direction, averaged over its tokens, float64 [rows]."""
        counts = mask_counts(self.rows).clamp(min=1)
        direction = self.main.double()
        return direction.sum(1) / counts if direction.dim() == 2 else direction

    def felt(self, new: New) -> tuple[float, float]:
        """Return two shares, from 0 to 1, of the gradient that are left after cancellation.

        For the first, the gradients of rows with equal tokens are added up. For the second, each token's
        gradient is also multiplied by 1 - p, because the gradient of a token that the model is certain of
        doesn't move any weights. ``new``: the model's outputs. Both shares are 1 if there is no gradient.
        """
        rows, numbers = keys(self.rows), dict[Row, int]()
        index = torch.tensor([numbers.setdefault(row, len(numbers)) for row in rows], dtype=torch.int64)
        total, left, followed = 0.0, 0.0, 0.0
        for direction in map(Tensor.double, self.by.values()):
            # 1 - p: how much a token can still move weights
            doubt = (
                -torch.expm1(new.logprobs.double())
                if new.logprobs is not None and direction.dim() == 2
                else 1.0
            )
            sums = torch.zeros(len(numbers), *direction.shape[1:], dtype=torch.float64).index_add(
                0, index, direction
            )
            certain = torch.zeros_like(sums).index_add(0, index, direction * doubt)
            total, left, followed = (
                total + float(direction.abs().sum()),
                left + float(sums.abs().sum()),
                followed + float(certain.abs().sum()),
            )
        return (left / total, followed / total) if total else (1.0, 1.0)

    def apart(self, other: Direction) -> float:
        """Return the distance to another gradient direction, relative to this one's norm.

        It is infinite if the two have different rows.
        """
        if (
            len(self.rows) != len(other.rows)
            or self.main.shape != other.main.shape
            or keys(self.rows) != keys(other.rows)
        ):
            return float("inf")
        size = self.main.double().norm()
        return (
            float((self.main.double() - other.main.double()).norm() / size)
            if size
            else float(bool(other.main.any()))
        )


def keys(batch: Batch) -> list[Row]:
    """Return each row's prompt and response token ids, which identify the row."""
    prompts, tokens = (map(tuple, batch.data[name].lists()) for name in ("prompt_tokens", "tokens"))
    return list(zip(prompts, tokens, strict=True))


def learned_rows(update: RecordedUpdate) -> RecordedUpdate:
    """Return the update with only its trainable rows, and with settings that are columns turned into numbers."""
    settings, batch = with_numbers(update.settings, update.batch, update.loss.signature)
    return replace(update, batch=learnable(batch, update.loss).batch, settings=settings)


def objective(update: RecordedUpdate, new: New, also: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the objective that an update minimises over all its rows in one step, as a 0-d float64 tensor.

    Losses are averaged as in the trainer. ``new``: the model's outputs. ``also``: columns to use in place of
    the rows' own.
    """
    batch = update.batch
    counts, mask = mask_counts(batch), (also or {}).get("mask", batch["mask"])
    if also and "mask" in also:
        counts = mask.sum(1)
    own = own_rows(batch, update.loss) if isinstance(update.loss, JointLoss) else None
    totals, new = MinibatchTotals.of(counts, own), only_masked(new, mask)
    shares = []
    for number, term in enumerate(update.terms):
        index = torch.arange(len(batch)) if term.where is None else batch[term.where].bool().nonzero()[:, 0]
        if not len(index):
            continue
        columns = _columns(batch, term.loss, index, also or {})
        weights = row_weights(counts[index], term.mean, totals.of_loss(number))
        value, _ = term.loss(new.rows(index, mask.shape[1]), *columns, **term.settings)
        shares.append(term.scale * weighted_sum(value, mask[index], weights, term.mean))
    return sum(shares[1:], shares[0]) if shares else torch.zeros((), dtype=torch.float64)


def _columns(batch: Batch, loss: object, index: Tensor, also: Mapping[str, Tensor]) -> Sequence[object]:
    names = [p.name for p in loss.signature.columns]  # type: ignore[attr-defined]
    values = loss_columns(batch, loss, torch.device("cpu"))  # type: ignore[arg-type]
    values = [also.get(name, value) for name, value in zip(names, values, strict=True)]
    everything = len(index) == len(batch)
    return [
        value
        if everything or value is None or (isinstance(value, Tensor) and value.dim() == 0)
        else value[index]
        if isinstance(value, Tensor)
        else [value[i] for i in index.tolist()]
        for value in values
    ]


def pushed(update: RecordedUpdate, new: New, also: Mapping[str, Tensor] | None = None) -> Direction:
    """Return an update's gradient direction at the model outputs ``new``.

    ``also``: columns to use in place of the rows' own.
    """
    leaves = New(
        **{name: x if x is None else x.detach().clone().requires_grad_() for name, x in vars(new).items()}
    )
    wanted = {name: x for name in update.loss.new if (x := getattr(leaves, name)) is not None}
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        value = objective(update, leaves, also)
        slopes = (
            torch.autograd.grad(value, list(wanted.values()), allow_unused=True)
            if value.requires_grad
            else [None] * len(wanted)
        )
    return Direction(
        update.batch,
        {
            name: torch.zeros_like(x) if g is None else -g
            for (name, x), g in zip(wanted.items(), slopes, strict=True)
        },
    )
