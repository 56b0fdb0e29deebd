"""The decode loop's key-value cache. Rows can be removed, and each step writes only its own entry."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from rlflow.backends.local.transformers_internals import Cache, DynamicLayer, DynamicSlidingWindowLayer

SPARE = 64  # additional tokens of capacity; buffers also grow by half


class GrowingLayer(DynamicLayer):
    """The cache of one layer: keys and values [rows, heads, tokens, size], as views of larger buffers.

    The cache in transformers copies all earlier tokens at every step, which takes most of the time with small
    models.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values [rows, heads, new tokens, width], and return all of them. Buffers grow by
        half, so most calls don't copy earlier tokens."""
        if not self.is_initialized:
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self.rooms = _room(key_states), _room(value_states)
            self.length = 0
        end = self.length + key_states.shape[-2]
        if end > self.rooms[0].shape[-2]:
            self.rooms = _room(self.keys, end), _room(self.values, end)
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, self.length : end] = new
        self._show(end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows with these indices, in this order. A row may be kept several times."""
        self.rooms = tuple(_room(shown.index_select(0, beam_idx)) for shown in (self.keys, self.values))
        self._show(self.length)

    def _show(self, end: int) -> None:
        self.length = end
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)


def new_cache(config: Any) -> Cache:
    """Create an empty cache for a model.

    Layers with a sliding window keep all tokens, because their attention mask applies the window. Layers
    without attention (linear, state space) use the cache from transformers.
    """
    cache = DynamicCache(config=config)
    cache.layers = [
        GrowingLayer() if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else layer
        for layer in cache.layers
    ]
    if cache.layer_class_to_replicate is not None:
        cache.layer_class_to_replicate = GrowingLayer
    return cache


def _room(content: Tensor, needed: int = 0) -> Tensor:
    """Copy ``content`` into the beginning of a larger buffer, with space for at least ``needed`` tokens."""
    rows, heads, length, size = content.shape
    capacity = max(length, needed) * 3 // 2 + SPARE
    room = torch.empty(rows, heads, capacity, size, dtype=content.dtype, device=content.device)
    room[:, :, :length] = content
    return room
