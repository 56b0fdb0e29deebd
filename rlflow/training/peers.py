"""The ranks that train one model together: the processes of torch's default group, or this one alone."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET = 64 << 20  # bytes of gradients that are added up at once


def ranks() -> int:
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def total(numbers: Tensor) -> Tensor:
    """The sum over all ranks; the tensor itself where there is one."""
    if ranks() > 1:
        numbers = numbers.clone()
        dist.all_reduce(numbers)
    return numbers


def add_gradients(parameters: Iterable[Tensor]) -> None:
    """Give every rank the sum of all ranks' gradients, in place. A rank without one counts as 0."""
    if ranks() == 1:
        return
    for bucket in _buckets(parameters):
        gradients = [parameter.grad if parameter.grad is not None else torch.zeros_like(parameter) for parameter in bucket]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        for parameter, piece in zip(bucket, torch.split(flat, [parameter.numel() for parameter in bucket]), strict=True):
            parameter.grad = piece.view_as(parameter).clone()


def _buckets(parameters: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Parameters of one dtype, up to BUCKET bytes; a larger one alone."""
    bucket: list[Tensor] = []
    for parameter in parameters:
        if bucket and (parameter.dtype != bucket[0].dtype or sum(p.nbytes for p in bucket) + parameter.nbytes > BUCKET):
            yield bucket
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield bucket
