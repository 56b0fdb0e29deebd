"""The update loop shared by all backends. It selects rows, splits them into minibatches and micro-batches,
computes losses and divisors, takes or skips optimizer steps, and collects metrics.

It also counts how many tokens of an update have a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.author.joint import JointLoss, LossTerm, terms
from rlflow.author.loss import Loss, Quantity
from rlflow.training.loss_rows import group_of, learnable, mask_counts, own_rows, token_counts
from rlflow.training.metrics import Meter, Totals, added, reported
from rlflow.training.minibatches import microbatches, minibatches, units_of
from rlflow.training.objective import Means, MinibatchTotals, New, check_mean, row_weights, weighted_sum
from rlflow.training.peers import Peers

TOKENS = "funnel/tokens"


def watch(new: New, mask: Tensor, columns: Mapping[str, Tensor], meter: Meter) -> None:
    """Count the tokens that get a gradient in a micro-batch's backward pass, and add the counts to ``meter``.
    Call this after the forward pass and before computing the loss.

    new: what the model computed. mask: bool [rows, T], the tokens that count. columns: float [rows, T] each.
    If these include ``logprobs`` and ``advantages``, clipped tokens are counted too.
    """
    computed = new.logprobs if new.logprobs is not None else new.values
    if computed is None or not computed.requires_grad:
        return
    old = columns.get("logprobs") if new.logprobs is not None else None
    # if the hook referred to the tensor itself, the tensor's graph and the weights would stay in memory until
    # the process ends
    values = computed.detach()

    def count(gradient: Tensor) -> None:
        meter.observe(_of_tokens(gradient, values, old, columns.get("advantages")), mask)

    computed.register_hook(count)  # type: ignore[no-untyped-call]


def _of_tokens(
    gradient: Tensor, new: Tensor, old: Tensor | None, advantages: Tensor | None
) -> dict[str, Tensor]:
    """Return each token's measurements, [rows, T], by name. ``token_funnel`` turns their sums over all tokens
    of an update into metrics."""
    size = gradient.abs().double()
    values = {"with_gradient": gradient != 0, "size": size, "square": size**2}
    if old is None:
        return values
    values["moved"] = (new - old).abs()
    if advantages is not None:
        stopped = (gradient == 0) & (advantages != 0)
        values |= {"clipped_above": stopped & (new > old), "clipped_below": stopped & (new < old)}
    return values


def token_funnel(totals: Mapping[str, Totals]) -> dict[str, float]:
    """Return the token metrics of an update. ``totals``: the sums over all ranks and all optimizer steps.
    Each token counts once per epoch.

    funnel/tokens                   tokens under the mask
    funnel/tokens_with_gradient     tokens with ∂loss/∂log-prob ≠ 0; with a value loss, ∂loss/∂value ≠ 0
    funnel/tokens_effective         (Σ|g|)² / Σg²: the number of tokens with a gradient if all gradients have one size
    funnel/tokens_clipped_above     tokens with an advantage, no gradient and a ratio to ``logprobs`` above 1; `_below`: below 1
    funnel/moved                    mean |new log-prob - logprobs| per token over steps, nats; with one step, the executor measures it
    """
    if "with_gradient" not in totals:
        return {}
    (size, tokens, *_), square = totals["size"], totals["square"][0]
    metrics = {
        TOKENS: totals["with_gradient"][1],
        f"{TOKENS}_with_gradient": totals["with_gradient"][0],
        f"{TOKENS}_effective": size * size / square if square > 0 else 0.0,
    }
    metrics |= {
        f"{TOKENS}_{name}": totals[name][0] for name in ("clipped_above", "clipped_below") if name in totals
    }
    return metrics | ({"funnel/moved": totals["moved"][0] / tokens} if "moved" in totals and tokens else {})


@dataclass(frozen=True)
class OptimizerStep:
    """The result of an optimizer step: whether it changed the weights, the gradient norm, and the learning
    rate."""

    applied: bool  # False if the gradient was not finite; then the step changed nothing
    grad_norm: float
    lr: float


class Learner(Protocol):
    """What a trainer must implement so that ``learn`` can train its model."""

    device: torch.device
    peers: Peers

    def compute(self, rows: Batch, want: tuple[str, ...]) -> New:
        """Run a forward pass over ``rows`` and return the quantities in ``want``, attached to the autograd
        graph. Per-token quantities have the padded shape of ``rows["tokens"]``."""

    def backward(self, objective: Tensor) -> None:
        """Backpropagate a 0-d objective, adding to the gradient of the current optimizer step."""

    def idle(self, want: tuple[Quantity, ...]) -> None:
        """Join in a micro-batch for which only other ranks have rows, with a forward and a backward pass that
        add no gradient. Called only if ranks run in lockstep."""

    def step(self) -> OptimizerStep:
        """Take an optimizer step: sum the gradients over all ranks, clip, change the weights, and clear the
        gradient."""


@dataclass(frozen=True)
class Passes:
    """How often an update goes over its rows (epochs), and how it splits them into minibatches and
    micro-batches."""

    epochs: int = 1  # passes over all rows
    minibatch: int | None = None  # rows per optimizer step over all ranks; None: all rows
    # how the loss values of a minibatch are averaged; a tuple if there are several losses
    mean: Means = "tokens"
    seed: int = 0  # seed for the order of the rows
    micro_tokens: int = 16384  # maximum padded tokens per forward
    # function that divides a step's units into micro-batches; None: divided by micro_tokens
    cut: Callable[[Batch, Sequence[Tensor]], Iterable[list[Tensor]]] | None = None

    def __post_init__(self) -> None:
        check_mean(self.mean)
        if self.minibatch is not None and self.minibatch < 1:
            raise ValueError(
                f"update: found minibatch={self.minibatch}, expected at least 1 row per step, or None for all"
            )


@dataclass(frozen=True)
class RankShare:
    """One rank's rows of an optimizer step, split into units (tensors of row indices), and the totals of the
    whole minibatch over all ranks."""

    units: Sequence[Tensor]
    totals: MinibatchTotals


def steps(
    units: Sequence[Tensor], counts: Tensor, passes: Passes, own: Tensor | None = None
) -> Iterator[RankShare]:
    """Yield one share, with all the rows, for each optimizer step of an update. Minibatches without a single
    token under the mask are skipped.

    units: tensors of row indices that must stay together. counts: int64 [rows], the number of tokens under
    the mask. own: bool [rows, losses], which losses use which rows, or None if there's only one loss.
    """
    for epoch in range(passes.epochs):
        for minibatch in minibatches(units, rows=passes.minibatch, seed=passes.seed, epoch=epoch):
            rows = torch.cat(minibatch)
            totals = MinibatchTotals.of(counts[rows], None if own is None else own[rows])
            if totals.rows:
                yield RankShare(minibatch, totals)


class Meters(NamedTuple):
    """An update's running totals."""

    loss: Meter  # metrics that the losses return
    signal: Meter  # token metrics that ``watch`` measures during backward


def learn(
    engine: Learner, batch: Batch, loss: Loss, settings: Mapping[str, Any], passes: Passes
) -> dict[str, float]:
    """Update a model in one process on all rows of ``batch`` whose loss columns are finite. Returns metrics
    by name.

    settings: keyword arguments of the loss. passes: epochs and minibatch sizes.
    """
    rows = learnable(batch, loss)
    units = units_of(group_of(rows.batch) if loss.rows == "group" else torch.arange(len(rows.batch)))
    own = own_rows(rows.batch, loss) if isinstance(loss, JointLoss) else None
    learned = learn_shares(
        engine, rows.batch, loss, settings, passes, steps(units, mask_counts(rows.batch), passes, own)
    )
    return together([learned], rows.left_out)


def learn_shares(
    engine: Learner,
    batch: Batch,
    loss: Loss,
    settings: Mapping[str, Any],
    passes: Passes,
    shares: Iterable[RankShare],
) -> Learned:
    """Take one optimizer step for each of ``shares``, and return this rank's results.

    Every rank calls this with its own rows and one share per optimizer step. A share may be empty.
    """
    counts, cut = mask_counts(batch), passes.cut or _padded(passes.micro_tokens)
    meters, steps, parts = Meters(Meter(), Meter()), _Steps(), terms(loss, settings, passes.mean)
    for share in shares:
        objective = torch.zeros((), dtype=torch.float64, device=engine.device)
        micros = list(cut(batch, share.units))
        # all ranks exchange this count before their first micro-batch, because ranks in lockstep wait for
        # each other in every micro-batch
        idle = engine.peers.idle(len(micros), engine.device)
        for micro in micros:
            rows = torch.cat(micro)
            objective += _backward(
                engine, batch.rows(rows), loss.new, parts, counts[rows], share.totals, meters
            )
        for _ in range(idle):
            engine.idle(loss.new)
        steps.add(engine.step(), engine.peers.total(objective), share.totals.rows)
    return Learned(meters.loss.rank_totals(), meters.signal.rank_totals(), steps.result())


def _padded(tokens: int) -> Callable[[Batch, Sequence[Tensor]], Iterable[list[Tensor]]]:
    return lambda batch, units: microbatches(units, token_counts(batch), tokens=tokens)


@dataclass(frozen=True)
class Learned:
    """One rank's results of an update, from which ``together`` computes metrics."""

    totals: Mapping[str, Totals]  # totals of the loss's metrics over this rank's rows
    signal: Mapping[str, Totals]  # totals of the token metrics that ``watch`` measures, over this rank's rows
    steps: Mapping[str, float]  # totals of the steps; equal on all ranks


def together(ranks: Sequence[Learned], left_out: int) -> dict[str, float]:
    """Return an update's metrics from the results of all ranks. ``left_out``, the number of rows that the
    update skipped, becomes a metric too."""
    totals, signal = added(rank.totals for rank in ranks), added(rank.signal for rank in ranks)
    return reported(totals) | token_funnel(signal) | dict(ranks[0].steps) | {"left_out": float(left_out)}


def _backward(
    engine: Learner,
    rows: Batch,
    want: tuple[Quantity, ...],
    parts: Sequence[LossTerm],
    counts: Tensor,
    totals: MinibatchTotals,
    meters: Meters,
) -> Tensor:
    """Backpropagate these rows' part of the objective, and return this part as 0-d float64. ``counts`` are
    the tokens under the mask, int64 [rows]."""
    mask = rows["mask"].to(engine.device)
    new = only_masked(engine.compute(rows, want), mask)
    watch(new, mask, _token_columns(rows, mask), meters.signal)
    shares = []
    for number, term in enumerate(parts):
        index = None if term.where is None else rows[term.where].bool().nonzero()[:, 0]
        if index is None:
            shares.append(
                _share(
                    term, rows, new, mask, row_weights(counts, term.mean, totals.of_loss(number)), meters.loss
                )
            )
        elif len(index):
            weights, on_device = (
                row_weights(counts[index], term.mean, totals.of_loss(number)),
                index.to(engine.device),
            )
            own = rows.rows(index)
            width = own["tokens"].shape[1]
            shares.append(
                _share(term, own, new.rows(on_device, width), mask[on_device, :width], weights, meters.loss)
            )
    share = sum(shares[1:], shares[0])
    engine.backward(share)
    return share.detach()


def _share(term: LossTerm, rows: Batch, new: New, mask: Tensor, weights: Tensor, meter: Meter) -> Tensor:
    """Return what these rows contribute to the objective through one loss, including the loss's factor
    ``scale``, as 0-d float64."""
    value, metrics = term.loss(new, *loss_columns(rows, term.loss, mask.device), **term.settings)
    share = weighted_sum(value, mask, weights.to(mask.device), term.mean)
    groups = int(group_of(rows)[-1]) + 1 if term.loss.rows == "group" else 0
    meter.add({f"{term.prefix}{name}": entry for name, entry in metrics.items()}, mask, groups)
    return share if term.scale == 1 else share * term.scale


def _token_columns(rows: Batch, mask: Tensor) -> dict[str, Tensor]:
    """Return those of the columns ``logprobs`` and ``advantages`` that the batch has in the mask's shape
    [rows, T], on the mask's device."""
    values = {name: rows[name] for name in ("logprobs", "advantages") if name in rows.columns}
    return {name: value.to(mask.device) for name, value in values.items() if value.shape == mask.shape}


def loss_columns(rows: Batch, loss: Loss, device: torch.device) -> list[Any]:
    """Return the columns that are arguments of the loss, padded, in the order of its parameters. An optional
    column is None if the batch doesn't have it."""
    values = [rows[p.name] if p.name in rows.columns else None for p in loss.signature.columns]
    return [value.to(device) if isinstance(value, Tensor) else value for value in values]


def only_masked(new: New, mask: Tensor) -> New:
    """Return the same per-token values, with gradients flowing only into tokens under the mask.

    This uses ``where``, because multiplying by the mask would turn a NaN outside the mask into a NaN
    gradient.
    """

    def cut(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.dim() == 1 else torch.where(mask, x, x.detach())

    return New(cut(new.logprobs), cut(new.entropy), cut(new.values), new.scores)


class _Steps:
    """Running totals over an update's optimizer steps."""

    def __init__(self) -> None:
        self.count = self.skipped = self.rows = 0
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.lr = 0.0

    def add(self, step: OptimizerStep, loss: Tensor, rows: int) -> None:
        self.rows += rows
        self.lr = step.lr
        if not step.applied:
            self.skipped += 1
            return
        self.count += 1
        self.losses.append(float(loss))
        self.norms.append(step.grad_norm)

    def result(self) -> dict[str, float]:
        """Return the metrics of the optimizer steps. ``loss`` and ``grad_norm`` are means over the applied
        steps, and are left out if none was applied."""
        out = {
            "steps": float(self.count),
            "skipped_steps": float(self.skipped),
            "rows": float(self.rows),
            "lr": self.lr,
        }
        if self.count:
            out |= {"loss": sum(self.losses) / self.count, "grad_norm": sum(self.norms) / self.count}
        return out
