"""The gradient of large embeddings that are the language-model head too: the head's has all rows of the
vocabulary, and the rows of the tokens that were read are added to it, in its memory. Autograd by itself makes
a second tensor of their size, and with sparse embeddings a third, since it adds nothing sparse in place."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlflow.backends.local.network import Network
from rlflow.backends.local.sampling import LARGE


def add_by_rows(network: Network) -> None:
    """Add the gradient of tied embeddings of a large vocabulary by rows, on a CPU: elsewhere sums of rows may
    come in any order.

    While they are read, the embeddings are another leaf of the graph with the same memory. What is
    accumulated there, for rows of tokens that there are, goes to the gradient of the parameter: by
    ``backward``. ``torch.autograd.grad`` for the parameter has the head's share alone."""
    embeddings, head = network.module.get_input_embeddings(), network.module.get_output_embeddings()
    tied = network.kind == "logprobs" and embeddings.weight is head.weight and embeddings.weight.requires_grad
    if tied and network.vocabulary >= LARGE and network.device.type == "cpu":
        embeddings.sparse = True
        lent: list[Tensor] = []  # the parameter, while the other leaf has its place
        embeddings.register_forward_pre_hook(partial(_lend, lent))
        embeddings.register_forward_hook(partial(_take_back, lent), always_call=True)


def _lend(lent: list[Tensor], embeddings: Any, _inputs: Any) -> None:
    """Put another leaf in the place of the parameter: past the module's own way, which takes parameters
    alone."""
    weight = embeddings.weight
    if torch.is_grad_enabled() and weight.requires_grad:
        leaf = weight.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(partial(_add_rows, weight))
        lent.append(weight)
        embeddings._parameters["weight"] = leaf


def _take_back(lent: list[Tensor], embeddings: Any, _inputs: Any, _outputs: Any) -> None:
    if lent:
        embeddings._parameters["weight"] = lent.pop()


def _add_rows(weight: Tensor, leaf: Tensor) -> None:
    """Move the sparse gradient of ``leaf`` to ``weight``, in place where it has one: the head comes first in
    a backward pass."""
    rows, leaf.grad = leaf.grad, None
    assert rows is not None
    if weight.grad is None:
        weight.grad = rows.to_dense()
    else:
        weight.grad.add_(rows)
