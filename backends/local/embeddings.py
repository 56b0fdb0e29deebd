"""Save memory in the gradient of large embeddings that are tied to the language-model head.

The head's gradient has all rows of the vocabulary. This module adds the gradient rows of the tokens that were
read to the head's gradient in place. Autograd alone would make a second tensor of the same size, and with
sparse embeddings a third, because it does not add sparse gradients in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlflow.backends.local.network import Network
from rlflow.backends.local.sampling import LARGE


def add_by_rows(network: Network) -> None:
    """Add the gradient of tied embeddings of a large vocabulary by rows. Use this only on a CPU, because the
    order of the sums may vary on other devices.

    While the embeddings are read, another leaf of the graph with the same memory replaces the parameter. The
    gradient of this leaf has only the rows of the tokens read. In ``backward`` it is added to the parameter's
    gradient. ``torch.autograd.grad`` for the parameter returns only the head's share."""
    embeddings, head = network.module.get_input_embeddings(), network.module.get_output_embeddings()
    tied = network.kind == "logprobs" and embeddings.weight is head.weight and embeddings.weight.requires_grad
    if tied and network.vocabulary >= LARGE and network.device.type == "cpu":
        embeddings.sparse = True
        replaced: list[Tensor] = []  # the parameter, while the other leaf replaces it
        embeddings.register_forward_pre_hook(partial(_replace, replaced))
        embeddings.register_forward_hook(partial(_restore, replaced), always_call=True)


def _replace(replaced: list[Tensor], embeddings: Any, _inputs: Any) -> None:
    """Replace the parameter with a second leaf, bypassing Module.__setattr__, which accepts only
    parameters."""
    weight = embeddings.weight
    if torch.is_grad_enabled() and weight.requires_grad:
        leaf = weight.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(partial(_add_rows, weight))
        replaced.append(weight)
        embeddings._parameters["weight"] = leaf


def _restore(replaced: list[Tensor], embeddings: Any, _inputs: Any, _outputs: Any) -> None:
    if replaced:
        embeddings._parameters["weight"] = replaced.pop()


def _add_rows(weight: Tensor, leaf: Tensor) -> None:
    """Move the sparse gradient of ``leaf`` to ``weight``, in place if ``weight`` has a gradient: in a
    backward pass, the head's comes first."""
    rows, leaf.grad = leaf.grad, None
    assert rows is not None
    if weight.grad is None:
        weight.grad = rows.to_dense()
    else:
        weight.grad.add_(rows)
