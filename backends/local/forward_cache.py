"""A forward pass kept with its graph, for the update that would compute the very same again."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.author.batch import Batch

READ = ("prompt_tokens", "tokens", "temperature")  # what a forward pass depends on besides the weights


class CachedForward:
    """One micro-batch at a time. Whoever changes the weights calls ``drop``."""

    def __init__(self) -> None:
        self.drop()

    def keep(self, rows: Batch, flat: dict[str, Tensor]) -> None:
        """flat: the quantities of ``rows``, differentiable, in the layout in which the trainer computes
        them."""
        self._rows, self._flat = rows, flat

    def take(self, rows: Batch, want: tuple[str, ...]) -> dict[str, Tensor] | None:
        """The quantities of ``want`` where they are held for just these rows in this order, else None. They
        are given away: their graph is good for one backward pass."""
        cached, flat = self._rows, self._flat
        self.drop()
        fits = (
            cached is not None and set(want) <= set(flat) and all(_equal(cached, rows, name) for name in READ)
        )
        return {name: flat[name] for name in want} if fits else None

    def drop(self) -> None:
        """Forget the forward and free its graph."""
        self._rows: Batch | None = None
        self._flat: dict[str, Tensor] = {}


def _equal(a: Batch, b: Batch, name: str) -> bool:
    if (name in a) != (name in b) or name not in a:
        return name not in a and name not in b
    one, other = a.data[name], b.data[name]
    same = torch.equal(one.value, other.value)
    return same and (one.lengths is None or torch.equal(one.lengths, other.lengths))
