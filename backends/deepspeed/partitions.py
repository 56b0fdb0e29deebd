"""Find, gather and divide parameters and optimizer state under ZeRO.

Under stage 3, each parameter is flattened and divided into equal parts, one per rank. Part r starts at
element r · ceil(size / ranks), and the last parts are padded. Under stages 1 and 2, each rank holds complete
parameters. Only the optimizer state is divided, as one flat tensor for all parameters.
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
    """Return the complete shape of a tensor, even if this rank holds only a part of it."""
    return tensor.ds_shape if is_cut(tensor) else tensor.shape


def part(tensor: Any) -> tuple[Tensor, int]:
    """Return this rank's part of a parameter, and the number of its first element in the flattened parameter.
    The part is flat, without padding, and not a copy."""
    if not is_cut(tensor):
        return tensor.detach().reshape(-1), 0
    partition = tensor.ds_tensor
    start = min(dist.get_rank() * partition.ds_numel, tensor.ds_numel)
    return partition[: min(partition.ds_numel, tensor.ds_numel - start)], start


def whole(tensor: Any) -> Tensor:
    """Return the complete parameter, gathered if it is divided among the ranks. Every rank must call this."""
    if not is_cut(tensor):
        return tensor.detach()
    partition = tensor.ds_tensor
    flat = partition.new_empty(partition.ds_numel * dist.get_world_size())
    dist.all_gather(list(flat.chunk(dist.get_world_size())), partition.detach())
    return flat[: tensor.ds_numel].view(tensor.ds_shape)


@torch.no_grad()
def put(tensor: Any, value: Tensor) -> None:
    """Write the complete ``value`` into a frozen weight, or into the model's copy of a trained weight. Each
    rank writes its own part."""
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
    """Write the complete ``value`` into a trained parameter: into the model's copy and the optimizer's
    copy."""
    put(parameter, value)
    value = value.to(parameter.device, torch.float32)
    if is_cut(parameter):
        _fragments().safe_set_local_fp32_param(parameter, _padded(parameter, value))
    else:
        _fragments().safe_set_full_fp32_param(parameter, value)


def put_moment(parameter: Any, name: str, value: Tensor) -> None:
    """Write this rank's part of the complete ``value`` into the AdamW moment ``name`` (``exp_avg`` or
    ``exp_avg_sq``) of a parameter."""
    value = value.to(parameter.device, torch.float32)
    if is_cut(parameter):
        _fragments().safe_set_local_optimizer_state(parameter, _padded(parameter, value), name)
    else:
        _fragments().safe_set_full_optimizer_state(parameter, value, name)


def _padded(parameter: Any, value: Tensor) -> Tensor:
    """Return this rank's part of the complete ``value``, flat and padded with zeros to the size of a part."""
    size = parameter.ds_tensor.ds_numel
    start = min(dist.get_rank() * size, value.numel())
    own = value.reshape(-1)[start : start + size]
    return torch.nn.functional.pad(own, (0, size - len(own)))


def flats(optimizer: Any) -> list[Tensor]:
    """Return the tensors that AdamW updates. There is one flat tensor per parameter group, with this rank's
    part of the group."""
    groups = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return groups if groups is not None else optimizer.single_partition_of_fp32_groups


def _fragments() -> Any:
    return importlib.import_module("deepspeed.utils")


def link_moments(optimizer: Any) -> None:
    """Make DeepSpeed look up the moments of each parameter again under stages 1 and 2. DeepSpeed itself does
    this only once, and only if the first parameter group has moments."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer._hp_optimizer_states_linked = False
        if optimizer.optimizer.state:
            optimizer._lazy_init_hp_params_optimizer_state()


class Parts:
    """A stand-in for a module. Its ``state_dict().items()`` gathers one complete tensor at a time."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def named_parameters(self) -> Any:
        """Return the names and parameters of the module. Nothing is gathered."""
        return self.module.named_parameters()

    def state_dict(self) -> Parts:
        """Return this object, which has ``items`` like a dict."""
        return self

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, complete tensor) for each tensor of the module. Every rank must iterate."""
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            yield name, whole(tensor)
