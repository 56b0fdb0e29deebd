"""Save memory for the gradient of large embeddings that are tied to the language-model head.

The gradient of the head has all rows of the vocabulary. This module adds the gradient rows of the tokens that
were read to this tensor, in place. Autograd alone would make a second tensor of the same size. With sparse
embeddings it would make a third, because autograd does not add sparse gradients in place.
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
    """Make the backward pass add the gradient of tied embeddings with a large vocabulary row by row. Use this
    only on a CPU, because on other devices the order of the sums may vary.

    While the embeddings are read, a second autograd leaf with the same memory replaces the parameter. Its
    gradient has only the rows of the tokens that were read. ``backward`` adds these rows to the parameter's
    gradient. ``torch.autograd.grad`` for the parameter returns only the head's part of the gradient.
    """
    embeddings, head = network.module.get_input_embeddings(), network.module.get_output_embeddings()
    tied = network.kind == "logprobs" and embeddings.weight is head.weight and embeddings.weight.requires_grad
    if tied and network.vocabulary >= LARGE and network.device.type == "cpu":
        embeddings.sparse = True
        replaced: list[Tensor] = []  # the parameter, while the other leaf replaces it
        embeddings.register_forward_pre_hook(partial(_replace, replaced))
        embeddings.register_forward_hook(partial(_restore, replaced), always_call=True)


def _replace(replaced: list[Tensor], embeddings: Any, _inputs: Any) -> None:
    """Replace the parameter with a second leaf."""
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
    """Move the sparse gradient of ``leaf`` to ``weight``. In a backward pass, the head's gradient comes
    first, so the rows are added to it in place."""
    rows, leaf.grad = leaf.grad, None
    assert rows is not None
    if weight.grad is None:
        weight.grad = rows.to_dense()
    else:
        weight.grad.add_(rows)
