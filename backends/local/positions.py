"""Attention masks that depend on token positions alone: they work for packed rows and decode steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import masking_utils

# transformers' mask function: batch, head, query's place, key's place → bool
Visible = Callable[[Any, Any, Tensor, Tensor], Any]


def by_positions(visible: Visible, local_size: int | None, longest: int, use_vmap: bool) -> Visible | None:
    """Return the mask function of a kind of layer; None if a token sees all tokens before it, in rows of at
    most ``longest`` tokens. Raises ValueError for a mask that does not depend on positions alone."""
    if use_vmap:
        raise ValueError("found a model with its own mask, expected masks that depend on positions alone")
    plain = visible is masking_utils.causal_mask_function or (local_size and longest <= local_size)
    return None if plain else visible
