"""Attention of a decode step in which several rows continue one prompt. The prompt's keys and values are
stored once.

A step has few queries, so reading keys and values takes most of its time. Here a prompt's keys and values are
read once for all of its rows. Their products are one matrix product per prompt and key head, instead of one
per row. A row's scores for its prompt and for its own tokens share one softmax.

Within ``stepping``, the "mask" that transformers passes to a layer's attention is a ``StepMask`` (as in
attention.py), and a layer's keys are the keys of the rows' own tokens.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from rlflow.author.scope import with_value
from rlflow.backends.local.cache import GrowingLayer
from rlflow.backends.local.positions import Visible, by_positions

EXACT = (torch.float32, torch.float64)  # shorter dtypes would round scores before the softmax


class BranchedLayer(GrowingLayer):
    """The keys and values of rows that continue prompts: the prompts' and the rows' own."""

    def __init__(self, prompts: GrowingLayer) -> None:
        super().__init__()
        self.before = prompts.keys, prompts.values  # [prompts, heads, width, size] each
        self.length = 0

    def get_seq_length(self) -> int:
        """Return the tokens of a row so far, including the prompt's."""
        return self.before[0].shape[-2] + self.length


class Branches:
    """The rows that continue prompts, and the layers of their cache.

    of: int64 [rows], ascending, the number of each row's prompt. inside: bool [prompts, width], False at
    padding; None if there is no padding.
    """

    def __init__(self, layers: list[BranchedLayer], of: Tensor, inside: Tensor | None) -> None:
        self.layers, self.inside = layers, inside
        self._put(of)

    @property
    def width(self) -> int:
        """Tokens of the longest prompt."""
        return int(self.layers[0].before[0].shape[-2])

    def take(self, index: Tensor) -> None:
        """Keep the rows at these ascending indices. Prompts without remaining rows are dropped."""
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
        """Give each prompt as many places for rows as the prompt with the most rows needs."""
        self.of, counts = of, torch.bincount(of)
        self.most = int(counts.max())
        self.even = bool((counts == self.most).all())
        self.places = of * self.most + torch.arange(len(of)) - (counts.cumsum(0) - counts)[of]

    def spread(self, rows: Tensor) -> Tensor:
        """Return [prompts, most, …] from rows [rows, …]; places without a row are ignored."""
        if not self.even:
            rows = rows.new_zeros(int(self.of[-1] + 1) * self.most, *rows.shape[1:]).index_copy_(
                0, self.places, rows
            )
        return rows.unflatten(0, (-1, self.most))

    def gather(self, places: Tensor) -> Tensor:
        """Return [rows, …], the content of the rows' places in [prompts, most, …]."""
        rows = places.flatten(0, 1)
        return rows if self.even else rows[self.places]


class StepMask:
    """The places that the rows of ``branches`` see in one step. visible: which earlier places a token sees;
    None: all of them."""

    def __init__(self, branches: Branches, visible: Visible | None) -> None:
        self.branches, self.visible = branches, visible
        self._hidden: tuple[Tensor | None, Tensor | None] | None = None

    def hidden(self, own: int) -> tuple[Tensor | None, Tensor | None]:
        """Return the hidden places: of the prompts, bool [prompts, 1, 1, 1, width], and of the rows' ``own``
        tokens, bool [own]; None: nothing is hidden."""
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
    """Return a context in which a model computes one token for each row of ``branches``; with None, it
    changes nothing."""
    return with_value(_STEP, branches)


def mask_of_step(local_size: int | None, visible: Visible, use_vmap: bool) -> StepMask | None:
    """Return the mask of the current step; None outside a step. Raises ValueError for a mask that depends on
    more than positions."""
    branches = _STEP.get()
    if branches is None:
        return None
    return StepMask(
        branches, by_positions(visible, local_size, branches.layers[0].get_seq_length() + 1, use_vmap)
    )


def attend_step(
    query: Tensor, key: Tensor, value: Tensor, mask: StepMask, scaling: float | None = None
) -> Tensor:
    """Return the attention of a decode step, [rows, 1, heads, size]. Queries are [rows, heads, 1, size], the
    rows' own keys and values [rows, key heads, own, size]. Raises ValueError for keys that do not belong to a
    layer."""
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
    """Return rows that continue from the prompts in ``cache``, whose layers are changed in place. of, inside:
    see ``Branches``. If a layer keeps more than keys and values, has a short dtype or is not on a CPU,
    returns None and leaves the cache unchanged."""
    if not all(
        type(layer) is GrowingLayer and layer.dtype in EXACT and layer.device.type == "cpu"
        for layer in cache.layers
    ):
        return None
    layers = [BranchedLayer(layer) for layer in cache.layers]
    cache.layers[:] = layers
    return Branches(layers, of, inside)
