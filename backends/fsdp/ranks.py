"""The mesh of a pool's ranks: data parallel in its outer dimension, tensor parallel in its inner one."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from rlflow.author import torch_private
from rlflow.errors import PlanError


@dataclass(frozen=True)
class Ranks:
    """The mesh of a pool's ranks, as seen from one of them."""

    data: DeviceMesh  # ranks with different rows
    tensor: DeviceMesh | None  # ranks that share a row's matrix products; None if each rank computes alone
    first: bool  # True if this rank is the pool's first

    @staticmethod
    def of(device: str, tensor_parallel: int) -> Ranks:
        """Arrange the ranks of torch's default group in a mesh.

        With t = ``tensor_parallel``, ranks k·t to (k+1)·t - 1 process the same rows together. Raises
        PlanError if the number of ranks isn't a multiple of t.
        """
        ranks = dist.get_world_size()
        if ranks % tensor_parallel:
            raise PlanError.of(
                "tensor-parallel",
                "tensor_parallel must divide the ranks of the pool",
                found=f"{tensor_parallel} of {ranks} ranks",
                expected="a divisor of the ranks",
                remedy="--tensor-parallel 1",
            )
        mesh = _mesh(dist.group.WORLD, torch.device(device).type, ranks // tensor_parallel, tensor_parallel)
        return Ranks(mesh["data"], mesh["tensor"] if tensor_parallel > 1 else None, dist.get_rank() == 0)


@functools.lru_cache(maxsize=4)
def _mesh(group: Any, device: str, data: int, tensor: int) -> DeviceMesh:
    """Return the mesh. It is cached for all models of a process, because every new mesh creates new process
    groups."""
    return init_device_mesh(device, (data, tensor), mesh_dim_names=("data", "tensor"))


def whole(tensor: Tensor) -> Tensor:
    """Return the complete tensor, gathered from all ranks. Every rank must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    # gather the inner division first; torch warns if one call does both
    for at in range(tensor.device_mesh.ndim):
        tensor = tensor.redistribute(placements=[Replicate()] * (at + 1) + list(tensor.placements[at + 1 :]))
    return tensor.to_local()


def own(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without copying it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def box(tensor: Tensor) -> tuple[slice, ...]:
    """Return the slices of the complete tensor that this rank holds."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, starts = torch_private.own_shard(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def copies(tensor: Tensor) -> int:
    """Return how many ranks of the default group, including this one, hold the same part of the tensor."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size()
    parts = [
        tensor.device_mesh.size(at)
        for at, placement in enumerate(tensor.placements)
        if not placement.is_replicate()
    ]
    return dist.get_world_size() // int(torch.tensor(parts).prod())
