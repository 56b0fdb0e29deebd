"""Save memory in the gradient of large embeddings that are tied to the language-model head.

The head's gradient covers the whole vocabulary. The gradients of the embeddings that were read are added to
it in place, row by row. Autograd alone would create a second tensor of this size, and a third with sparse
embeddings, because it doesn't add sparse gradients in place.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlflow.author import torch_private
from rlflow.backends.local.network import Network
from rlflow.backends.local.sampling import LARGE


def add_by_rows(network: Network) -> None:
    """Add the gradient of tied embeddings row by row in the backward pass, if the vocabulary is large.

    This only applies on a CPU, because the order of the sums may vary on other devices. While the embeddings
    are read, the parameter is replaced by another autograd leaf that uses the same memory. The leaf's
    gradient has rows only for the tokens that were read, and ``backward`` adds them to the parameter's
    gradient. Note that ``torch.autograd.grad`` returns only the head's part of the parameter's gradient.
    """
    embeddings, head = network.module.get_input_embeddings(), network.module.get_output_embeddings()
    tied = network.kind == "logprobs" and embeddings.weight is head.weight and embeddings.weight.requires_grad
    if tied and network.vocabulary >= LARGE and network.device.type == "cpu":
        embeddings.sparse = True
        replaced: list[Tensor] = []  # the parameter, while the other leaf replaces it
        embeddings.register_forward_pre_hook(partial(_replace, replaced))
        embeddings.register_forward_hook(partial(_restore, replaced), always_call=True)


def _replace(replaced: list[Tensor], embeddings: Any, _inputs: Any) -> None:
    """Swap the parameter for another autograd leaf that uses the same memory."""
    weight = embeddings.weight
    if torch.is_grad_enabled() and weight.requires_grad:
        leaf = weight.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(partial(_add_rows, weight))
        replaced.append(weight)
        torch_private.replace_parameter(embeddings, "weight", leaf)


def _restore(replaced: list[Tensor], embeddings: Any, _inputs: Any, _outputs: Any) -> None:
    if replaced:
        torch_private.replace_parameter(embeddings, "weight", replaced.pop())


def _add_rows(weight: Tensor, leaf: Tensor) -> None:
    """Move the sparse gradient of ``leaf`` to ``weight``. The head's gradient is already there by then, so
    the rows are added in place."""
    rows, leaf.grad = leaf.grad, None
    assert rows is not None
    if weight.grad is None:
        weight.grad = rows.to_dense()
    else:
        weight.grad.add_(rows)
