"""The ranks that train one model together: those of a torch group, or this process alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 64 << 20  # bytes of gradients that are added up at once


@dataclass(frozen=True)
class Peers:
    """The ranks that train one model together."""

    # torch's group of the data-parallel ranks; None: its default group, or this process alone where there is
    # none
    group: Any = None
    # whether ranks compute micro-batch by micro-batch together, as those must that hold a part of the weights
    # each
    lockstep: bool = False

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        if self.group is not None:
            return int(self.group.size())
        return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks; the tensor itself where there is one."""
        if self.ranks > 1:
            numbers = numbers.clone()
            dist.all_reduce(numbers, group=self.group)
        return numbers

    def idle(self, count: int, device: torch.device) -> int:
        """How many micro-batches more than this rank's ``count`` the busiest one has, which ranks in lockstep
        take with it."""
        if self.ranks == 1 or not self.lockstep:
            return 0
        most = torch.tensor(count, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most) - count

    def add_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Give every rank the sum of all ranks' gradients, in place. A rank without one counts as 0."""
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
    """Parameters of one dtype, up to BUCKET bytes; a larger one alone."""
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
