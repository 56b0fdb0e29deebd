"""The language-model head where few rows are read at a time, as in a step of decoding."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from rlflow.backends.local.network import Network
from rlflow.backends.local.sampling import LARGE

# rows up to which weight · hiddenᵀ takes at most 0.6 of the time of hidden · weightᵀ (`python
# benchmarks/head.py`)
FEW = 10


def read_few_rows(network: Network) -> None:
    """Have the head of a large vocabulary in float32, on a CPU, multiply few rows the other way round: MKL
    takes a sixth to three fifths of the time for it."""
    head = network.module.get_output_embeddings()
    plain = (
        type(head) is nn.Linear
        and head.bias is None
        and head.weight.dtype == torch.float32
        and head.weight.device.type == "cpu"
    )
    if plain and network.vocabulary >= LARGE and torch.backends.mkl.is_available():
        network.read = partial(_read, head)


def _read(head: nn.Linear, hidden: Tensor) -> Tensor:
    return turned(head.weight, hidden) if hidden.dim() == 2 and 0 < len(hidden) <= FEW else head(hidden)


def turned(weight: Tensor, hidden: Tensor) -> Tensor:
    """hidden [rows, hidden size] · weightᵀ [hidden size, vocabulary] as the transpose of weight · hiddenᵀ,
    copied to a tensor whose rows are contiguous. One row is taken twice: MKL's product of a matrix and a
    vector is slower than one of two vectors."""
    several = hidden.repeat(2, 1) if len(hidden) == 1 else hidden
    return (weight @ several.T)[:, : len(hidden)].T.contiguous()
