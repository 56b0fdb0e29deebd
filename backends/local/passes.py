"""Passes through a model: hidden states of rows in either layout, and whether a model can compute the packed one."""

from __future__ import annotations

import torch
from torch import Tensor

from rlflow.backends.local.attention import over
from rlflow.backends.local.network import Network
from rlflow.backends.local.packing import PackedRows, packed
from rlflow.backends.local.sequences import Sequences, sequences
from rlflow.batch import Batch

CLOSE = {torch.float64: 1e-6, torch.float32: 1e-3}  # of hidden states of one model; 0.05 in shorter numbers
TRIAL = {"prompt_tokens": [[3, 4, 5, 6, 7, 8], [3, 4, 5, 6, 7, 2], [9, 3]], "tokens": [[4, 9, 5], [2, 3], [6]]}


def hidden_states(network: Network, layout: Sequences) -> Tensor:
    """[places, hidden] for the places of a layout, which ``before`` and ``last`` name."""
    if isinstance(layout, PackedRows):
        with over(layout.blocks):  # with a mask, or transformers looks for rows that begin at position 0
            return network.hidden(layout.ids, layout.positions, attention_mask=torch.ones_like(layout.ids), use_cache=False)[0]
    positions = torch.arange(layout.ids.shape[1], device=layout.ids.device)[None]
    return network.hidden(layout.ids, positions, use_cache=False).flatten(0, 1)


@torch.no_grad()
def can_pack(network: Network) -> bool:
    """Whether a model computes packed rows as it computes each by itself, which is tried on a few tokens. Where its layers carry state from
    token to token, or attend by other means than torch's attention, it does not."""
    if "position_ids" not in network.takes:
        return False
    vocabulary = network.module.get_input_embeddings().weight.shape[0]
    rows = Batch.of(**{name: [[token % vocabulary for token in row] for row in some] for name, some in TRIAL.items()})
    try:
        apart, together = (layout(rows, network.device) for layout in (sequences, packed))
        one, other = (hidden_states(network, layout)[layout.before].double() for layout in (apart, together))
    except (AttributeError, RuntimeError, TypeError, ValueError):  # of a model that wants its mask to be a tensor
        return False
    close = CLOSE.get(network.module.dtype, 0.05)
    return torch.allclose(one, other, rtol=close, atol=close * float(one.abs().max()))
