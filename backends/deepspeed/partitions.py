"""Find, gather and divide parameters and optimizer state under ZeRO.

Under stage 3, each flattened parameter is divided into equal parts, one per rank; the last parts are padded.
Part r starts at element r · ceil(size / ranks). Under stages 1 and 2, each rank holds complete parameters,
and only the optimizer state of all parameters together is divided.
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
    """Return True if each rank holds only a part of the tensor."""
    return hasattr(tensor, "ds_tensor")


def shape(tensor: Any) -> torch.Size:
    """Return the shape of the complete tensor."""
    return tensor.ds_shape if is_cut(tensor) else tensor.shape


def part(tensor: Any) -> tuple[Tensor, int]:
    """Return this rank's part of a parameter, flat and without padding, and the number of the part's first
    element. The part is not a copy."""
    if not is_cut(tensor):
        return tensor.detach().reshape(-1), 0
    partition = tensor.ds_tensor
    start = min(dist.get_rank() * partition.ds_numel, tensor.ds_numel)
    return partition[: min(partition.ds_numel, tensor.ds_numel - start)], start


def whole(tensor: Any) -> Tensor:
    """Return the complete parameter. Every rank must call it. If the parameter is divided, each rank gets a
    new tensor."""
    if not is_cut(tensor):
        return tensor.detach()
    partition = tensor.ds_tensor
    flat = partition.new_empty(partition.ds_numel * dist.get_world_size())
    dist.all_gather(list(flat.chunk(dist.get_world_size())), partition.detach())
    return flat[: tensor.ds_numel].view(tensor.ds_shape)


@torch.no_grad()
def put(tensor: Any, value: Tensor) -> None:
    """Set a frozen weight, or the model's copy of a trained weight, to the complete ``value``."""
    if not is_cut(tensor):
        tensor.copy_(value)
        return
    own, start = part(tensor)
    own.copy_(value.reshape(-1)[start : start + len(own)])


def moment(parameter: Any, name: str) -> Tensor:
    """Return a complete moment of AdamW (``exp_avg`` or ``exp_avg_sq``). Every rank must call it."""
    return _fragments().safe_get_full_optimizer_state(parameter, name).detach()


def put_learning(parameter: Any, value: Tensor) -> None:
    """Set a trained parameter to the complete ``value``, in the model and in the optimizer's own copy."""
    put(parameter, value)
    value = value.to(parameter.device, torch.float32)
    if is_cut(parameter):
        _fragments().safe_set_local_fp32_param(parameter, _padded(parameter, value))
    else:
        _fragments().safe_set_full_fp32_param(parameter, value)


def put_moment(parameter: Any, name: str, value: Tensor) -> None:
    """Set this rank's part of a moment of AdamW (``exp_avg`` or ``exp_avg_sq``) from the complete
    ``value``."""
    value = value.to(parameter.device, torch.float32)
    if is_cut(parameter):
        _fragments().safe_set_local_optimizer_state(parameter, _padded(parameter, value), name)
    else:
        _fragments().safe_set_full_optimizer_state(parameter, value, name)


def _padded(parameter: Any, value: Tensor) -> Tensor:
    """Return this rank's part of ``value``, padded with zeros."""
    size = parameter.ds_tensor.ds_numel
    start = min(dist.get_rank() * size, value.numel())
    own = value.reshape(-1)[start : start + size]
    return torch.nn.functional.pad(own, (0, size - len(own)))


def flats(optimizer: Any) -> list[Tensor]:
    """Return the tensors that AdamW updates: this rank's part of the parameters, one flat tensor per
    parameter group."""
    groups = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return groups if groups is not None else optimizer.single_partition_of_fp32_groups


def _fragments() -> Any:
    return importlib.import_module("deepspeed.utils")


def link_moments(optimizer: Any) -> None:
    """Make stages 1 and 2 look up each parameter's moments again. DeepSpeed looks them up only once, and only
    if the first parameter group has moments."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer._hp_optimizer_states_linked = False
        if optimizer.optimizer.state:
            optimizer._lazy_init_hp_params_optimizer_state()


class Parts:
    """A module whose ``state_dict`` gathers each tensor only when the iteration reaches it."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def named_parameters(self) -> Any:
        """Return the parameters of the module, without gathering."""
        return self.module.named_parameters()

    def state_dict(self) -> Parts:
        """Return this object; its ``items`` gathers one tensor at a time."""
        return self

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, complete tensor) of each tensor of the module. Every rank must take part."""
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            yield name, whole(tensor)
