"""The attention masks of a model that go by tokens' positions alone, so that they hold for packed rows and
for the steps of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import masking_utils

# transformers' mask function: batch, head, query's and key's place → bool
Visible = Callable[[Any, Any, Tensor, Tensor], Any]


def by_positions(visible: Visible, local_size: int | None, longest: int, use_vmap: bool) -> Visible | None:
    """The mask function of a kind of layer; None where a token of rows of at most ``longest`` tokens sees all
    before it. Raises ValueError for a mask that no position explains."""
    if use_vmap:
        raise ValueError("found a model with a mask of its own, expected one whose masks go by positions")
    plain = visible is masking_utils.causal_mask_function or (local_size and longest <= local_size)
    return None if plain else visible
