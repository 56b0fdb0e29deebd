"""Where ZeRO keeps a parameter and its optimizer state, and how they are put together and taken apart.

Under stage 3 every rank holds one of equal parts of each flattened parameter, the last ones padded: part r
starts at element r · ceil(size / ranks). Under stages 1 and 2 every rank holds it whole, and the optimizer's
state of all parameters together is cut.
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
    """Whether ranks hold parts of it."""
    return hasattr(tensor, "ds_tensor")


def shape(tensor: Any) -> torch.Size:
    """The shape of the whole."""
    return tensor.ds_shape if is_cut(tensor) else tensor.shape


def part(tensor: Any) -> tuple[Tensor, int]:
    """This rank's part of a parameter, flat and without padding, and the element at which it starts. Not a
    copy."""
    if not is_cut(tensor):
        return tensor.detach().reshape(-1), 0
    partition = tensor.ds_tensor
    start = min(dist.get_rank() * partition.ds_numel, tensor.ds_numel)
    return partition[: min(partition.ds_numel, tensor.ds_numel - start)], start


def whole(tensor: Any) -> Tensor:
    """The parameter as it would be on one rank. Every rank calls this; of a cut one each gets a tensor of its
    own."""
    if not is_cut(tensor):
        return tensor.detach()
    partition = tensor.ds_tensor
    flat = partition.new_empty(partition.ds_numel * dist.get_world_size())
    dist.all_gather(list(flat.chunk(dist.get_world_size())), partition.detach())
    return flat[: tensor.ds_numel].view(tensor.ds_shape)


@torch.no_grad()
def put(tensor: Any, value: Tensor) -> None:
    """Take a new value for a weight that does not learn, or for the copy of one that does with which the
    model computes."""
    if not is_cut(tensor):
        tensor.copy_(value)
        return
    own, start = part(tensor)
    own.copy_(value.reshape(-1)[start : start + len(own)])


def moment(parameter: Any, name: str) -> Tensor:
    """A moment of AdamW, whole. Every rank calls this."""
    return _fragments().safe_get_full_optimizer_state(parameter, name).detach()


def put_learning(parameter: Any, value: Tensor) -> None:
    """Take a new value for a parameter that learns: for the model, and for the optimizer's own copy."""
    put(parameter, value)
    value = value.to(parameter.device, torch.float32)
    if is_cut(parameter):
        _fragments().safe_set_local_fp32_param(parameter, _padded(parameter, value))
    else:
        _fragments().safe_set_full_fp32_param(parameter, value)


def put_moment(parameter: Any, name: str, value: Tensor) -> None:
    """Write a moment of AdamW (``exp_avg`` or ``exp_avg_sq``), whole, into the part of it that this rank
    keeps."""
    value = value.to(parameter.device, torch.float32)
    if is_cut(parameter):
        _fragments().safe_set_local_optimizer_state(parameter, _padded(parameter, value), name)
    else:
        _fragments().safe_set_full_optimizer_state(parameter, value, name)


def _padded(parameter: Any, value: Tensor) -> Tensor:
    """This rank's part of ``value``, zeros after its end."""
    size = parameter.ds_tensor.ds_numel
    start = min(dist.get_rank() * size, value.numel())
    own = value.reshape(-1)[start : start + size]
    return torch.nn.functional.pad(own, (0, size - len(own)))


def flats(optimizer: Any) -> list[Tensor]:
    """The tensors that AdamW steps: this rank's part of the parameters, one flat tensor for each group of
    them."""
    groups = getattr(optimizer, "fp32_partitioned_groups_flat", None)
    return groups if groups is not None else optimizer.single_partition_of_fp32_groups


def _fragments() -> Any:
    return importlib.import_module("deepspeed.utils")


def link_moments(optimizer: Any) -> None:
    """Tell stages 1 and 2 where each parameter's moments are. They look once, when the first group of
    parameters alone has any."""
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer._hp_optimizer_states_linked = False
        if optimizer.optimizer.state:
            optimizer._lazy_init_hp_params_optimizer_state()


class Parts:
    """A module whose ``state_dict`` brings each tensor together as one comes to it."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def named_parameters(self) -> Any:
        """The parameters of the module, as they lie."""
        return self.module.named_parameters()

    def state_dict(self) -> Parts:
        """This object, whose ``items`` gathers one tensor at a time."""
        return self

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each tensor of the module. Every rank has to take part."""
        for name, tensor in self.module.state_dict(keep_vars=True).items():
            yield name, whole(tensor)
