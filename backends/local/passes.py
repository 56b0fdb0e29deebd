"""Compute the hidden states of padded or packed rows, and test whether a model supports packing."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.backends.local.attention import over
from rlflow.backends.local.network import Network
from rlflow.backends.local.packing import PackedRows, packed
from rlflow.backends.local.sequences import Sequences, sequences

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}  # tolerance of hidden states; 0.2 in shorter dtypes
TRIAL = {
    "prompt_tokens": [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 2], [9, 3]],
    "tokens": [[4, 9, 5], [2, 3], [6]],
}
# changes a token of the first row only
OWN = {"prompt_tokens": [[3, 4, 5, 6, 7, 1], *TRIAL["prompt_tokens"][1:]]}
# changes a token that the first two rows share
COMMON = {"prompt_tokens": [[2, 4, 5, 6, 7, 8], [2, 4, 5, 6, 7, 2], [9, 3]]}


def hidden_states(network: Network, layout: Sequences) -> Tensor:
    """Return the hidden states at all positions of the layout, [positions, hidden], which ``layout.before``
    and ``layout.last`` index."""
    if isinstance(layout, PackedRows):
        # without a mask, transformers would search for rows that begin at position 0
        with over(layout.blocks):
            return network.hidden(
                layout.ids, layout.positions, attention_mask=torch.ones_like(layout.ids), use_cache=False
            )[0]
    positions = torch.arange(layout.ids.shape[1], device=layout.ids.device)[None]
    return network.hidden(layout.ids, positions, use_cache=False).flatten(0, 1)


@torch.no_grad()
def can_pack(network: Network) -> bool:
    """Return True if the model's results for packed rows match those for single rows.

    This is tested on a few tokens. The answer is False if the model's layers carry state from token to token
    or don't use torch's attention.
    """
    if "position_ids" not in network.takes:
        return False
    try:
        single, together, own, common = (_tried(network, layout, rows) for layout, rows in TRIALS)
    # a model that requires a tensor as its mask
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    close = all(alike(network, one, other) for one, other in zip(together, single, strict=True))
    return (
        close
        and _changed(together, own) == [True, False, False]
        and _changed(together, common) == [True, True, False]
    )


def _tried(
    network: Network,
    layout: Callable[[Batch, torch.device], Sequences],
    columns: Mapping[str, list[list[int]]],
) -> list[Tensor]:
    """For each row, return the hidden states before its response tokens."""
    vocabulary = network.module.get_input_embeddings().weight.shape[0]
    rows = Batch.of(
        **{name: [[token % vocabulary for token in row] for row in some] for name, some in columns.items()}
    )
    laid = layout(rows, network.device)
    return list(hidden_states(network, laid)[laid.before].split(laid.lengths.tolist()))


TRIALS: tuple[tuple[Callable[[Batch, torch.device], Sequences], Mapping[str, list[list[int]]]], ...] = (
    (sequences, TRIAL),
    (packed, TRIAL),
    (packed, TRIAL | OWN),
    (packed, TRIAL | COMMON),
)


def alike(network: Network, one: Tensor, other: Tensor) -> bool:
    """Return True if two results for the same hidden states differ only by rounding."""
    close = CLOSE.get(network.amp or one.dtype, 0.2)
    return torch.allclose(one.double(), other.double(), rtol=close, atol=close * float(other.abs().max()))


def _changed(before: list[Tensor], after: list[Tensor]) -> list[bool]:
    """For each row, tell whether any bit of its hidden states has changed. This works even in short dtypes,
    in which rounding may be larger than the effect of one row on another."""
    return [not torch.equal(one, other) for one, other in zip(before, after, strict=True)]
