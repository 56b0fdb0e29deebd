"""Attention of a decode step in which several rows continue the same prompt. The keys and values of the
prompt are stored once.

A decode step has few queries, so it spends most of its time reading keys and values. Here, the keys and
values of a prompt are read once for all of its rows: one matrix product per prompt and key head instead of
one per row. One softmax covers the scores of a row for its prompt and for its own tokens.

Within ``stepping``, the "mask" that transformers passes to the attention of a layer is a ``StepMask`` (as in
attention.py). The keys of the layer are the keys of the rows' own tokens.
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
    """The cache of one layer for rows that continue prompts: keys and values of the prompts, and keys and
    values of the rows' own tokens."""

    def __init__(self, prompts: GrowingLayer) -> None:
        super().__init__()
        self.before = prompts.keys, prompts.values  # [prompts, heads, width, size] each
        self.length = 0

    def get_seq_length(self) -> int:
        """Return the number of tokens of a row so far, including its prompt."""
        return self.before[0].shape[-2] + self.length


class Branches:
    """Rows that continue prompts, and the cache layers of these rows.

    of: int64 [rows], ascending, the number of each row's prompt. inside: bool [prompts, width], False at
    padding; None if there is no padding.
    """

    def __init__(self, layers: list[BranchedLayer], of: Tensor, inside: Tensor | None) -> None:
        self.layers, self.inside = layers, inside
        self._put(of)

    @property
    def width(self) -> int:
        """The number of tokens of the longest prompt."""
        return int(self.layers[0].before[0].shape[-2])

    def take(self, index: Tensor) -> None:
        """Keep only the rows with these numbers, which must ascend. Prompts without remaining rows are
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
        ``of``: the number of each row's prompt."""
        self.of, counts = of, torch.bincount(of)
        self.most = int(counts.max())
        self.even = bool((counts == self.most).all())
        self.places = of * self.most + torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]

    def spread(self, rows: Tensor) -> Tensor:
        """Return [prompts, most, …]: the values ``rows`` [rows, …], with each row at its place. Places
        without a row are 0."""
        if not self.even:
            rows = rows.new_zeros(int(self.of[-1] + 1) * self.most, *rows.shape[1:]).index_copy_(
                0, self.places, rows
            )
        return rows.unflatten(0, (-1, self.most))

    def gather(self, places: Tensor) -> Tensor:
        """Return [rows, …]: the values at the places of the rows in ``places`` [prompts, most, …]."""
        rows = places.flatten(0, 1)
        return rows if self.even else rows[self.places]


class StepMask:
    """The mask of one decode step of ``branches``. visible: the model's own mask function, which says which
    earlier tokens a token sees; None if it sees all."""

    def __init__(self, branches: Branches, visible: Visible | None) -> None:
        self.branches, self.visible = branches, visible
        self._hidden: tuple[Tensor | None, Tensor | None] | None = None

    def hidden(self, own: int) -> tuple[Tensor | None, Tensor | None]:
        """Return which tokens are hidden in this step: of the prompts, bool [prompts, 1, 1, 1, width], and of
        the ``own`` tokens of each row, bool [own]. Each is None if nothing is hidden."""
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
    """Return a context in which a model processes one token of each row in ``branches``. With None, the
    context has no effect."""
    return with_value(_STEP, branches)


def mask_of_step(local_size: int | None, visible: Visible, use_vmap: bool) -> StepMask | None:
    """Return the mask of the current decode step; None outside ``stepping``. Raises ValueError if the model's
    mask depends on more than token positions."""
    branches = _STEP.get()
    if branches is None:
        return None
    return StepMask(
        branches, by_positions(visible, local_size, branches.layers[0].get_seq_length() + 1, use_vmap)
    )


def attend_step(
    query: Tensor, key: Tensor, value: Tensor, mask: StepMask, scaling: float | None = None
) -> Tensor:
    """Return the attention of a decode step, [rows, 1, heads, size].

    query: [rows, heads, 1, size]. key, value: the rows' own tokens, [rows, key heads, own, size]. Raises
    ValueError if ``key`` does not belong to a layer of the cache.
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
    """Return rows that continue from the prompts in ``cache``, and replace the layers of the cache with
    branched layers. of, inside: as in ``Branches``.

    If a layer stores more than keys and values, has a short dtype or is not on a CPU, return None and leave
    the cache unchanged.
    """
    if not all(
        type(layer) is GrowingLayer and layer.dtype in EXACT and layer.device.type == "cpu"
        for layer in cache.layers
    ):
        return None
    layers = [BranchedLayer(layer) for layer in cache.layers]
    cache.layers[:] = layers
    return Branches(layers, of, inside)
