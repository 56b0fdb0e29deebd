"""Attention for decode steps in which several rows continue the same prompt, whose keys and values are stored
only once.

A decode step has few queries, so it spends most of its time reading keys and values. Here, a prompt's keys
and values are read once for all its rows, with one matrix product per prompt and key head rather than one per
row. A single softmax covers a row's scores for its prompt and for its own tokens.

Inside ``stepping``, the "mask" that transformers passes to a layer's attention is a ``StepMask`` (as in
attention.py), and the layer's keys are those of the rows' own tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor

from rlflow.author.scope import with_value
from rlflow.backends.local.cache import GrowingLayer
from rlflow.backends.local.positions import Visible, by_positions
from rlflow.backends.local.transformers_internals import Cache

EXACT = (torch.float32, torch.float64)  # shorter dtypes would round scores before the softmax


class BranchedLayer(GrowingLayer):
    """One layer's cache for rows that continue prompts, with the keys and values of the prompts and of the
    rows' own tokens."""

    def __init__(self, prompts: GrowingLayer) -> None:
        super().__init__()
        self.before = prompts.keys, prompts.values  # [prompts, heads, width, size] each
        self.length = 0

    def get_seq_length(self) -> int:
        """Return the length of a row so far in tokens, including its prompt."""
        return self.before[0].shape[-2] + self.length


class Branches:
    """Rows that continue prompts, together with their cache layers.

    of: int64 [rows], ascending, the index of each row's prompt. inside: bool [prompts, width], False at
    padding, or None if there's no padding.
    """

    def __init__(self, layers: list[BranchedLayer], of: Tensor, inside: Tensor | None) -> None:
        self.layers, self.inside = layers, inside
        self._put(of)

    @property
    def width(self) -> int:
        """The length of the longest prompt in tokens."""
        return int(self.layers[0].before[0].shape[-2])

    def take(self, index: Tensor) -> None:
        """Keep only the rows with these indices, which must be ascending. Prompts that have no rows left are
        dropped."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.reorder_cache(index)
        left, of = torch.unique_consecutive(self.of[index], return_inverse=True)
        if len(left) < len(self.layers[0].before[0]):
            for layer in self.layers:
                layer.before = layer.before[0][left], layer.before[1][left]
            self.inside = self.inside[left] if self.inside is not None else None
        self._put(of)

    def _put(self, of: Tensor) -> None:
        """Assign each row a place. Every prompt gets as many places as the prompt with the most rows needs.

        of: the index of each row's prompt.
        """
        self.of, counts = of, torch.bincount(of)
        self.most = int(counts.max())
        self.even = bool((counts == self.most).all())
        self.places = of * self.most + torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]

    def spread(self, rows: Tensor) -> Tensor:
        """Move ``rows`` [rows, …] to their places, [prompts, most, …]. Places without a row are 0."""
        if not self.even:
            rows = rows.new_zeros(int(self.of[-1] + 1) * self.most, *rows.shape[1:]).index_copy_(
                0, self.places, rows
            )
        return rows.unflatten(0, (-1, self.most))

    def gather(self, places: Tensor) -> Tensor:
        """Undo ``spread``: collect the rows [rows, …] from their places [prompts, most, …]."""
        rows = places.flatten(0, 1)
        return rows if self.even else rows[self.places]


class StepMask:
    """The mask for one decode step of ``branches``.

    visible: the model's own mask function, which says which earlier tokens a token sees, or None if it sees
    them all.
    """

    def __init__(self, branches: Branches, visible: Visible | None) -> None:
        self.branches, self.visible = branches, visible
        self._hidden: tuple[Tensor | None, Tensor | None] | None = None

    def hidden(self, own: int) -> tuple[Tensor | None, Tensor | None]:
        """Return masks of the tokens hidden in this step: bool [prompts, 1, 1, 1, width] for the prompts, and
        bool [own] for the ``own`` tokens of each row. Either is None if nothing is hidden."""
        if self._hidden is None:
            width, inside = self.branches.width, self.branches.inside
            before, after = None if inside is None else ~inside, None
            if self.visible is not None:
                here, places = torch.tensor(width + own - 1), torch.arange(width + own)
                unseen = ~torch.as_tensor(self.visible(0, 0, here, places))
                before, after = unseen[:width] if before is None else before | unseen[:width], unseen[width:]
            before = (
                before.expand(len(self.branches.layers[0].before[0]), width)[:, None, None, None]
                if before is not None
                else None
            )
            self._hidden = before, after
        return self._hidden


_STEP: ContextVar[Branches | None] = ContextVar("step", default=None)


def stepping(branches: Branches | None) -> AbstractContextManager[None]:
    """Let a model process one token of each row in ``branches`` inside a ``with`` block. None has no
    effect."""
    return with_value(_STEP, branches)


def mask_of_step(local_size: int | None, visible: Visible, use_vmap: bool) -> StepMask | None:
    """Return the mask for the current decode step, or None outside ``stepping``. Raises ValueError if the
    model's mask depends on anything besides token positions."""
    branches = _STEP.get()
    if branches is None:
        return None
    return StepMask(
        branches, by_positions(visible, local_size, branches.layers[0].get_seq_length() + 1, use_vmap)
    )


def attend_step(
    query: Tensor, key: Tensor, value: Tensor, mask: StepMask, scaling: float | None = None
) -> Tensor:
    """Compute the attention of a decode step, [rows, 1, heads, size].

    query: [rows, heads, 1, size]. key, value: the rows' own tokens, [rows, key heads, own, size]. Raises
    ValueError if ``key`` doesn't belong to a layer of the cache.
    """
    branches = mask.branches
    layer = next((layer for layer in branches.layers if layer.keys is key), None)
    if layer is None:
        raise ValueError("found keys of no layer in the cache, expected keys that a layer has just stored")
    rows, heads, _one, size = query.shape
    kinds = key.shape[1]
    each = query.reshape(rows, kinds, heads // kinds, size) * (size**-0.5 if scaling is None else scaling)
    keys, values = layer.before
    hidden, own_hidden = mask.hidden(key.shape[-2])
    # [prompts, key heads, rows of a prompt, queries of a head, size]
    places = branches.spread(each).transpose(1, 2)
    before = (places.flatten(2, 3) @ keys.mT).unflatten(2, places.shape[2:4]).transpose(1, 2)
    own = each @ key.mT
    if hidden is not None:
        before = before.masked_fill(hidden, -torch.inf)
    if own_hidden is not None:
        own = own.masked_fill(own_hidden, -torch.inf)
    shares = torch.cat([branches.gather(before), own], -1).softmax(-1)
    width = keys.shape[-2]
    of_prompt = branches.spread(shares[..., :width]).transpose(1, 2)
    from_prompt = (of_prompt.flatten(2, 3) @ values).unflatten(2, of_prompt.shape[2:4]).transpose(1, 2)
    return (shares[..., width:] @ value + branches.gather(from_prompt)).reshape(rows, 1, heads, -1)


def branched(cache: Cache, of: Tensor, inside: Tensor | None) -> Branches | None:
    """Create rows that continue the prompts in ``cache``, whose layers are replaced with branched ones.
    ``of`` and ``inside`` are as in ``Branches``.

    Returns None and leaves the cache alone if a layer stores more than keys and values, has a short dtype, or
    isn't on a CPU.
    """
    if not all(
        type(layer) is GrowingLayer and layer.dtype in EXACT and layer.device.type == "cpu"
        for layer in cache.layers
    ):
        return None
    layers = [BranchedLayer(layer) for layer in cache.layers]
    cache.layers[:] = layers
    return Branches(layers, of, inside)
