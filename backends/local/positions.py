"""Attention masks that depend only on token positions, and therefore work for packed rows and decode
steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlflow.backends.local.transformers_internals import causal_mask_function

# transformers' mask function: batch, head, query's place, key's place → bool
Visible = Callable[[Any, Any, Tensor, Tensor], Any]


def by_positions(visible: Visible, local_size: int | None, longest: int, use_vmap: bool) -> Visible | None:
    """Return the mask function ``visible`` of a kind of layer, or None if every token sees all earlier ones
    in rows of up to ``longest`` tokens.

    local_size: the size of the layer's window or chunk. Raises ValueError if ``use_vmap`` is True, because
    the mask then depends on more than positions.
    """
    if use_vmap:
        raise ValueError("found a model with its own mask, expected masks that depend on positions alone")
    plain = visible is causal_mask_function or (local_size and longest <= local_size)
    return None if plain else visible
