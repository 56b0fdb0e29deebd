"""Exchange JSON values between the ranks of a torch group, with limits and checks.

A group's sockets aren't authenticated, so received data is never unpickled.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from rlflow.training.weight_sync.transport import TransferError

LARGEST = 256 << 20  # maximum number of bytes that one rank may send
TEXT = TypeAdapter(str)
T = TypeVar("T")


def exchange(own: T, kind: TypeAdapter[T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Send ``own`` to all ranks of the group, and return the values of all ranks in rank order (an
    all-gather).

    Every rank of the group must call this. Raises TransferError if a value is longer than LARGEST bytes or
    isn't of the type ``kind``.
    """
    return [_decoded(rank, raw, kind) for rank, raw in enumerate(_gathered(kind.dump_json(own), group))]


def _gathered(own: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    lengths = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    dist.all_gather(list(lengths.view(-1, 1).unbind()), torch.tensor([len(own)]), group=group)
    for rank, length in enumerate(lengths.tolist()):
        if not 0 < length <= LARGEST:
            raise TransferError(f"rank {rank} sent {length} bytes, expected 1 to {LARGEST}")
    longest = int(lengths.max())
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    everything = torch.empty(len(lengths), longest, dtype=torch.uint8)
    dist.all_gather(list(everything.unbind()), padded, group=group)
    return [bytes(row[:length].numpy()) for row, length in zip(everything, lengths.tolist(), strict=True)]


def _decoded(rank: int, raw: bytes, kind: TypeAdapter[T]) -> T:
    try:
        return kind.validate_json(raw, strict=True)
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise TransferError(
            f"rank {rank} sent an invalid value: {where + ': ' if where else ''}{error.errors()[0]['msg']}"
        ) from None
