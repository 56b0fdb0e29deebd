"""The parts of live tensors that a rank holds, as boxes with views of their memory."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.author import torch_private
from rlflow.errors import PlanError
from rlflow.training.weight_sync.boxes import Box, chunk, contains, flat_boxes, lengths, volume, whole, within
from rlflow.training.weight_sync.layout import TensorShard

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, eq=False)
class ShardView:
    """A box of a tensor that this rank holds, and a view of its memory."""

    box: Box
    # the elements of the box, in its shape and with any strides; the memory must not move
    view: Tensor

    def at(self, box: Box) -> Tensor:
        """Return a view of the elements in ``box``, which must lie inside this shard's box."""
        return self.view[within(box, self.box)] if box else self.view


@dataclass(frozen=True, eq=False)
class TensorViews:
    """The boxes of one tensor that this rank holds, with views of their memory."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[ShardView, ...]

    def held(self) -> TensorShard:
        """Return the boxes covered by these views, without their memory."""
        return TensorShard(self.shape, self.dtype, tuple(piece.box for piece in self.pieces))

    def around(self, box: Box) -> list[ShardView]:
        """Return the views whose boxes contain all of ``box``."""
        return [piece for piece in self.pieces if contains(piece.box, box)]


def held(pieces: Mapping[str, TensorViews]) -> dict[str, TensorShard]:
    """Return the boxes that this rank holds, by tensor name and without their memory. Ranks exchange these
    before planning."""
    return {name: views.held() for name, views in pieces.items()}


def pieces_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, TensorViews]:
    """Return views of the parts of each parameter that this rank holds, by Hugging Face name.

    A parameter may be a complete tensor, a DTensor (FSDP2, tensor parallelism) or a ZeRO-3 partition. A tied
    parameter appears under each of its names.
    """
    return {name: _pieces(name, tensor) for name, tensor in tensors}


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Return True if the tensor is a DTensor, without importing torch's DTensor module, which would take most
    of a second per worker. Until someone has imported it, there can't be any DTensors."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _pieces(name: str, tensor: Tensor) -> TensorViews:
    if is_dtensor(tensor):
        return from_dtensor(name, tensor)
    if hasattr(tensor, "ds_tensor"):
        return from_zero3(name, tensor)
    return from_plain(tensor)


def ties_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """For each name under which ``tensors`` yields a tensor again, return the tensor's first name."""
    first: dict[tuple[int, int, torch.Size], str] = {}
    ties = {}
    for name, tensor in tensors:
        local = (
            cast("DTensor", tensor.detach()).to_local()
            if is_dtensor(tensor)
            else getattr(tensor, "ds_tensor", tensor)
        )
        key = (torch_private.storage_key(local), int(local.storage_offset()), tensor.shape)
        if first.setdefault(key, name) != name:
            ties[name] = first[key]
    return ties


def from_plain(tensor: Tensor) -> TensorViews:
    """Return a complete tensor as a single view."""
    return TensorViews(
        tuple(tensor.shape), dtype_name(tensor), (ShardView(whole(tensor.shape), tensor.detach()),)
    )


def from_dtensor(name: str, tensor: DTensor) -> TensorViews:
    """Return a view of this rank's shard of a DTensor, which may be uneven or strided. Raises PlanError if
    the DTensor is a sum over ranks, or if its local shard isn't a single box."""
    if any(placement.is_partial() for placement in tensor.placements):
        raise PlanError.of(
            "reshard-partial",
            f"tensor {name!r} is a sum over ranks, and each rank holds only one term",
            found=str(tensor.placements),
            expected="Shard or Replicate",
            remedy="redistribute it first",
        )
    _check_order(name, tensor.device_mesh)
    shape, offset = torch_private.own_shard(tensor.shape, tensor.device_mesh, tensor.placements)
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
    """Raise PlanError unless ranks are in ascending order along each dimension of the mesh. torch sorts the
    ranks of a group, and FSDP2 shards in this order."""
    groups = [dist.get_process_group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)]
    if [ranks.index(mesh.get_rank()) for ranks in groups] != list(mesh.get_coordinate() or ()):
        raise PlanError.of(
            "reshard-mesh",
            f"the mesh of tensor {name!r} does not determine the shard of each rank",
            found=str(mesh),
            expected="ranks in ascending order along each dimension",
            remedy="keep the trainer's ranks ascending, and reorder the rollout ranks instead",
        )


def from_zero3(name: str, parameter: Tensor) -> TensorViews:
    """Return views of this rank's partition of a DeepSpeed ZeRO-3 parameter. DeepSpeed keeps the data in
    ``ds_tensor`` and the full shape in ``ds_shape``."""
    group = getattr(parameter, "ds_process_group", None)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    return from_flat(name, parameter.ds_tensor.detach(), tuple(parameter.ds_shape), rank, ranks)  # type: ignore[attr-defined]


def from_flat(name: str, part: Tensor, shape: Sequence[int], rank: int, ranks: int) -> TensorViews:
    """Return views of this rank's part of a flattened tensor with the given shape.

    part: 1-D, the elements from ``rank * ceil(numel / ranks)`` on. Padding past the end of the tensor is
    never read. Raises PlanError if ``part`` has too few elements.
    """
    start, stop = chunk(volume(whole(shape)), rank, ranks)
    if part.dim() != 1 or part.numel() < stop - start:
        raise PlanError.of(
            "reshard-flat",
            f"rank {rank} holds too little of the flattened tensor {name!r}",
            found=f"shape {list(part.shape)}",
            expected=f"1-D, {stop - start} elements: ceil(numel / {ranks})",
            remedy="pass all elements of this rank's part, flattened",
        )
    views, done = [], 0
    for box in flat_boxes(shape, start, stop):
        views.append(ShardView(box, part[done : done + volume(box)].view(lengths(box))))
        done += volume(box)
    return TensorViews(tuple(shape), dtype_name(part), tuple(views))


def dtype_name(tensor: Tensor) -> str:
    """Return the name of the tensor's dtype, without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")
