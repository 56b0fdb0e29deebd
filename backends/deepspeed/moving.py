"""Find the tensors that a DeepSpeed trainer holds on this rank, and move them between devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlflow.backends.deepspeed.partitions import flats, is_cut
from rlflow.backends.local.network import Network


def held(part: str, network: Network, optimizer: Any) -> Iterator[Tensor]:
    """Yield the tensors of one part of the model (weights, gradient or optimizer) that are in this rank's
    memory.

    optimizer: DeepSpeed's optimizer, or None for a frozen model. Some of the tensors are views of DeepSpeed's
    flat buffers and move along with them.
    """
    if part == "weights":
        yield from (tensor.ds_tensor if is_cut(tensor) else tensor for tensor in network.held())
    elif optimizer is not None and part == "gradient":
        yield optimizer.grad_partitions_flat_buffer
    elif optimizer is not None:
        yield from flats(optimizer)
        yield from (
            tensor
            for state in optimizer.optimizer.state.values()
            for tensor in state.values()
            if tensor.dim()
        )


def move_rest(network: Network, device: torch.device) -> None:
    """Move buffers and frozen weights to ``device``. DeepSpeed's optimizer doesn't do this."""
    for tensor in [
        *network.module.parameters(),
        *network.module.buffers(),
        *(network.head.parameters() if network.head else ()),
    ]:
        if is_cut(tensor):
            tensor.ds_tensor.data = tensor.ds_tensor.data.to(device)
        if tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)
