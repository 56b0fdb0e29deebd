"""The ranks that train one model together, either those of a torch process group or this process alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 64 << 20  # bytes of gradients in one all-reduce


@dataclass(frozen=True)
class Peers:
    """The ranks that train one model together. Computes sums over them."""

    # torch's group of the data-parallel ranks; None: the default group, or this process alone if there is no
    # default group
    group: Any = None
    # True if ranks run each micro-batch together; required if each rank holds a part of the weights
    lockstep: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks, which is 1 for this process alone."""
        if self.group is not None:
            return int(self.group.size())
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sum of ``numbers`` over all ranks, or ``numbers`` itself if there is only one."""
        if self.ranks > 1:
            numbers = numbers.clone()
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def idle(self, count: int, device: torch.device) -> int:
        """Return how many micro-batches this rank must join without rows of its own: the largest ``count`` of
        any rank minus this rank's. Always 0 without lockstep.

        count: how many micro-batches this rank has.
        """
        if self.ranks == 1 or not self.lockstep:
            return 0
        most = torch.tensor(count, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most) - count

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace each parameter's gradient with its sum over all ranks. A missing gradient counts as 0."""
        if self.ranks == 1:
            return
        for bucket in _buckets(parameters):
            gradients = [
                parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
                for parameter in bucket
            ]
            flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
            dist.all_reduce(flat, group=self.group)
            for parameter, piece in zip(
                bucket, torch.split(flat, [parameter.numel() for parameter in bucket]), strict=True
            ):
                parameter.grad = piece.view_as(parameter).clone()


def _buckets(parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Yield lists of parameters with the same dtype and at most BUCKET bytes in total. A parameter larger
    than BUCKET gets its own list."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and (
            parameter.dtype != bucket[0].dtype or sum(p.nbytes for p in bucket) + parameter.nbytes > BUCKET
        ):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
