"""Find, gather and split parameters and optimizer state under ZeRO.

Under stage 3, each parameter is flattened and split into equal parts, one per rank. Part r starts at element
r · ceil(size / ranks), and the last parts are padded. Under stages 1 and 2, each rank holds complete
parameters, and only the optimizer state is split, as one flat tensor for all parameters.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def is_cut(tensor: Tensor) -> bool:
    """Return True if this rank holds only part of the tensor."""
    return hasattr(tensor, "ds_tensor")


def shape(tensor: Any) -> torch.Size:
    """Return the full shape of a tensor, even if this rank holds only part of it."""
    return tensor.ds_shape if is_cut(tensor) else tensor.shape


def part(tensor: Any) -> tuple[Tensor, int]:
    """Return a view of this rank's part of a parameter, flat and without padding, and the index of its first
    element in the flattened parameter."""
    if not is_cut(tensor):
        return tensor.detach().reshape(-1), 0
    partition = tensor.ds_tensor
    start = min(dist.get_rank() * partition.ds_numel, tensor.ds_numel)
    return partition[: min(partition.ds_numel, tensor.ds_numel - start)], start


def whole(tensor: Any) -> Tensor:
    """Return the complete parameter, gathering it if it is split. Every rank must call this."""
    if not is_cut(tensor):
        return tensor.detach()
    partition = tensor.ds_tensor
    flat = partition.new_empty(partition.ds_numel * dist.get_world_size())
    dist.all_gather(list(flat.chunk(dist.get_world_size())), partition.detach())
    return flat[: tensor.ds_numel].view(tensor.ds_shape)


@torch.no_grad()
def put(tensor: Any, value: Tensor) -> None:
    """Write the complete ``value`` into a frozen weight, or into the model's copy of a trained weight. Each
    rank writes only its own part."""
    if not is_cut(tensor):
        tensor.copy_(value)
        return
    own, start = part(tensor)
    own.copy_(value.reshape(-1)[start : start + len(own)])


def moment(parameter: Any, name: str) -> Tensor:
    """Return the complete AdamW moment ``name`` (``exp_avg`` or ``exp_avg_sq``) of a parameter. Every rank
    must call this."""
    return _fragments().safe_get_full_optimizer_state(parameter, name).detach()


def put_learning(parameter: Any, value: Tensor) -> None:
    """Write the complete ``value`` into a trained parameter, both in the model and in the optimizer."""
    put(parameter, value)
    value = value.to(parameter.device, torch.float32)
    if is_cut(parameter):
        _fragments().safe_set_local_fp32_param(parameter, _padded(parameter, value))
    else:
        _fragments().safe_set_full_fp32_param(parameter, value)


def put_moment(parameter: Any, name: str, value: Tensor) -> None:
    """Set the AdamW moment ``name`` (``exp_avg`` or ``exp_avg_sq``) of a parameter from the complete
    ``value``. Each rank writes only its own part."""
    value = value.to(parameter.device, torch.float32)
    if is_cut(parameter):
        _fragments().safe_set_local_optimizer_state(parameter, _padded(parameter, value), name)
    else:
        _fragments().safe_set_full_optimizer_state(parameter, value, name)


def _padded(parameter: Any, value: Tensor) -> Tensor:
    """Return this rank's part of the complete ``value``, flat and zero-padded to the size of a part."""
    size = parameter.ds_tensor.ds_numel
    start = min(dist.get_rank() * size, value.numel())
    own = value.reshape(-1)[start : start + size]
    return torch.nn.functional.pad(own, (0, size - len(own)))


def flats(optimizer: Any) -> list[Tensor]:
    """Return the flat tensors that AdamW updates: this rank's part of each parameter group."""
    groups = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return groups if groups is not None else optimizer.single_partition_of_fp32_groups


def _fragments() -> Any:
    return importlib.import_module("deepspeed.utils")


def link_moments(optimizer: Any) -> None:
    """Make DeepSpeed look up each parameter's moments again under stages 1 and 2.

    DeepSpeed looks them up only once, and only if the first parameter group has moments.
    """
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer._hp_optimizer_states_linked = False
        if optimizer.optimizer.state:
            optimizer._lazy_init_hp_params_optimizer_state()


class Parts:
    """A stand-in for a module whose ``state_dict().items()`` gathers one complete tensor at a time."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def named_parameters(self) -> Any:
        """Return the module's named parameters without gathering them."""
        return self.module.named_parameters()

    def state_dict(self) -> Parts:
        """Return this object itself, which has ``items`` like a dict."""
        return self

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, complete tensor) pairs for the module. Every rank must iterate to the end."""
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            yield name, whole(tensor)
