"""Move one model's weights towards another's, in place and without gathering: each rank moves its own parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rlflow.training.protocols import ShowsMasters, Trainer
from rlflow.training.weight_sync.shards import ShardView, TensorViews, pieces_of

STORED = "parameters/"  # prefix of weights in the state of a trainer


@torch.no_grad()
def move(view: Tensor, value: Tensor, mix: float) -> None:
    """Move a tensor towards ``value`` in place: (1 - mix) x view + mix x value. With a mix of 1, copy it.

    Every element takes the same three steps, so the result doesn't depend on how tensors are divided. Whole
    numbers, such as counts, are copied.
    """
    if mix == 1 or not view.is_floating_point():
        view.copy_(value)
    else:
        view.add_((value.to(view) - view).mul_(mix))


def follow(trainer: ShowsMasters, weights: Iterable[tuple[str, Tensor]], mix: float) -> None:
    """Move this rank's parts of a trainer's weights towards other weights.

    ``weights``: what ``masters`` of another trainer on the same ranks returned, or complete tensors by name. If
    they are divided over ranks, those of ``trainer`` must be divided in the same way. Every rank must call
    this. Raises ValueError if the two models don't have the same tensors.
    """
    own = pieces_of(trainer.masters())
    for name, tensor in weights:
        found = own.pop(name, None)
        if found is None or found.shape != _shape(tensor):
            raise ValueError(f"follow: found '{name}' {list(_shape(tensor))}, expected {_known(found, own)}")
        _move_pieces(name, found, pieces_of([(name, tensor)])[name], mix)
    if own:
        raise ValueError(f"follow: found no '{next(iter(own))}', expected every weight of the model")


def complete(trainer: Trainer) -> dict[str, Tensor]:
    """Return all weights of a trainer as complete tensors, as ``masters`` shows them, on its first rank.

    Every rank must call this. Ranks other than the first may get nothing.
    """
    state = trainer.state()
    return {name.removeprefix(STORED): tensor for name, tensor in state.items() if name.startswith(STORED)}


def _move_pieces(name: str, own: TensorViews, other: TensorViews, mix: float) -> None:
    for piece in own.pieces:
        around = other.around(piece.box)
        if not around:
            raise ValueError(f"follow: '{name}' is divided over the ranks in two ways, expected one")
        move(piece.view, around[0].at(piece.box), mix)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the full shape of a tensor, even if this rank holds only part of it."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def _known(found: TensorViews | None, own: Mapping[str, TensorViews]) -> str:
    return f"the shape {list(found.shape)}" if found is not None else f"one of {', '.join([*own][:8])}"


@torch.no_grad()
def empty_like(views: TensorViews) -> TensorViews:
    """Return views of new memory for the same boxes."""
    pieces = tuple(ShardView(piece.box, torch.empty_like(piece.view)) for piece in views.pieces)
    return TensorViews(views.shape, views.dtype, pieces)
