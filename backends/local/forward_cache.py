"""Keep a forward pass and its autograd graph, so the next update doesn't have to run it again."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.author.batch import Batch

READ = ("prompt_tokens", "tokens", "temperature")  # a forward pass depends on these and on the weights


class CachedForward:
    """Keeps the forward pass of up to one micro-batch. Call ``drop`` whenever the weights change."""

    def __init__(self) -> None:
        self.drop()

    def keep(self, rows: Batch, flat: dict[str, Tensor]) -> None:
        """Keep the forward pass of ``rows``. ``flat`` is its results, attached to the graph, in the trainer's
        flat layout."""
        self._rows, self._flat = rows, flat

    def take(self, rows: Batch, want: tuple[str, ...]) -> dict[str, Tensor] | None:
        """Return the quantities in ``want`` if the kept pass is over exactly these rows in this order, or
        None otherwise.

        Either way, nothing is kept afterwards, because a graph serves only one backward pass.
        """
        cached, flat = self._rows, self._flat
        self.drop()
        fits = (
            cached is not None and set(want) <= set(flat) and all(_equal(cached, rows, name) for name in READ)
        )
        return {name: flat[name] for name in want} if fits else None

    def drop(self) -> None:
        """Drop the kept pass and free its graph."""
        self._rows: Batch | None = None
        self._flat: dict[str, Tensor] = {}


def _equal(a: Batch, b: Batch, name: str) -> bool:
    if (name in a) != (name in b) or name not in a:
        return name not in a and name not in b
    one, other = a.data[name], b.data[name]
    same = torch.equal(one.value, other.value)
    return same and (one.lengths is None or torch.equal(one.lengths, other.lengths))
