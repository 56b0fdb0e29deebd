"""Pieces of live tensors: which box of its tensor each has, and the memory in which it lies."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.errors import PlanError
from rlflow.training.weight_sync.boxes import Box, chunk, contains, flat_boxes, lengths, volume, whole, within
from rlflow.training.weight_sync.layout import TensorShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class ShardView:
    """A box of a tensor that this rank holds, as a view."""

    box: Box
    # the elements of the box, of its shape and with any strides, in memory that stays where it is
    view: Tensor

    def at(self, box: Box) -> Tensor:
        """The elements of a box that lies within."""
        return self.view[within(box, self.box)] if box else self.view


@dataclass(frozen=True, eq=False)
class TensorViews:
    """The parts of one tensor of ``shape`` that this rank holds, as views."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[ShardView, ...]

    def held(self) -> TensorShard:
        """The shard that these views cover, without their memory."""
        return TensorShard(self.shape, self.dtype, tuple(piece.box for piece in self.pieces))

    def around(self, box: Box) -> list[ShardView]:
        """The views whose box contains ``box``."""
        return [piece for piece in self.pieces if contains(piece.box, box)]


def held(pieces: Mapping[str, TensorViews]) -> dict[str, TensorShard]:
    """The shards of this rank by tensor name, without their memory: what ranks exchange once before they
    plan."""
    return {name: views.held() for name, views in pieces.items()}


def pieces_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, TensorViews]:
    """Views of a trainer's parameters by Hugging Face name: sharded by FSDP2 or tensor parallelism (DTensor),
    by ZeRO-3, or whole. Tied parameters come under each of their names."""
    return {name: _pieces(name, tensor) for name, tensor in tensors}


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether torch has sharded a tensor. Its module for that takes most of a second to import, in each
    worker: where nothing has imported it, no tensor is sharded so."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _pieces(name: str, tensor: Tensor) -> TensorViews:
    if is_dtensor(tensor):
        return from_dtensor(name, tensor)
    if hasattr(tensor, "ds_tensor"):
        return from_zero3(name, tensor)
    return from_plain(tensor)


def ties_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The names under which a tensor comes once more, each with the first one."""
    first: dict[tuple[int, int, torch.Size], str] = {}
    ties = {}
    for name, tensor in tensors:
        local = (
            cast("DTensor", tensor.detach()).to_local()
            if is_dtensor(tensor)
            else getattr(tensor, "ds_tensor", tensor)
        )
        key = (local.untyped_storage()._cdata, int(local.storage_offset()), tensor.shape)
        if first.setdefault(key, name) != name:
            ties[name] = first[key]
    return ties


def from_plain(tensor: Tensor) -> TensorViews:
    """A whole tensor as one view."""
    return TensorViews(
        tuple(tensor.shape), dtype_name(tensor), (ShardView(whole(tensor.shape), tensor.detach()),)
    )


def from_dtensor(name: str, tensor: DTensor) -> TensorViews:
    """This rank's own box by its local shape and offset, which holds for uneven and strided shards too.
    Raises PlanError for a tensor that is a sum over ranks."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if any(placement.is_partial() for placement in tensor.placements):
        raise PlanError.of(
            "reshard-partial",
            f"tensor {name!r} is a sum over ranks, of which each holds a term",
            found=str(tensor.placements),
            expected="Shard or Replicate",
            remedy="redistribute it first",
        )
    _check_order(name, tensor.device_mesh)
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    local: Tensor = cast("DTensor", tensor.detach()).to_local()
    box = tuple((start, start + size) for start, size in zip(offset, shape, strict=True))
    if tuple(local.shape) != lengths(box) and volume(box):
        raise PlanError.of(
            "reshard-shard",
            f"the shard of {name!r} is not one box",
            found=f"local shape {list(local.shape)}",
            expected=str(list(box)),
            remedy="shard it in contiguous ranges",
        )
    return TensorViews(
        tuple(tensor.shape), dtype_name(local), (ShardView(box, local),) if volume(box) else ()
    )


def _check_order(name: str, mesh: DeviceMesh) -> None:
    """Torch sorts the ranks of a group, and FSDP2 shards by their order there, whatever the mesh says."""
    groups = [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)]
    if [ranks.index(mesh.get_rank()) for ranks in groups] != list(mesh.get_coordinate() or ()):
        raise PlanError.of(
            "reshard-mesh",
            f"the mesh of tensor {name!r} does not say which shard a rank has",
            found=str(mesh),
            expected="ranks in ascending order along each dimension",
            remedy="order the ranks of the rollout instead",
        )


def from_zero3(name: str, parameter: Tensor) -> TensorViews:
    """A parameter that DeepSpeed has partitioned: ``ds_tensor`` has this rank's part, ``ds_shape`` the
    shape."""
    group = getattr(parameter, "ds_process_group", None)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return from_flat(name, parameter.ds_tensor.detach(), tuple(parameter.ds_shape), rank, ranks)  # type: ignore[attr-defined]


def from_flat(name: str, part: Tensor, shape: Sequence[int], rank: int, ranks: int) -> TensorViews:
    """part: 1-D, the elements from ``rank * ceil(numel / ranks)`` on. What lies behind the tensor's end is
    padding and never read."""
    start, stop = chunk(volume(whole(shape)), rank, ranks)
    if part.dim() != 1 or part.numel() < stop - start:
        raise PlanError.of(
            "reshard-flat",
            f"rank {rank} holds too little of the flattened tensor {name!r}",
            found=f"shape {list(part.shape)}",
            expected=f"1-D, {stop - start} elements: ceil(numel / {ranks})",
        )
    views, done = [], 0
    for box in flat_boxes(shape, start, stop):
        views.append(ShardView(box, part[done : done + volume(box)].view(lengths(box))))
        done += volume(box)
    return TensorViews(tuple(shape), dtype_name(part), tuple(views))


def dtype_name(tensor: Tensor) -> str:
    """The dtype's name without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")
