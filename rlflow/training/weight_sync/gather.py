"""The reference: every tensor is gathered whole on every rank, which keeps what it needs.

What most frameworks do, and what the others are compared with. It knows neither plan nor bucket, only who holds what.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from rlflow.training.weight_sync.boxes import Box, lengths, volume, within
from rlflow.training.weight_sync.layout import WeightLayout, check_tiles
from rlflow.training.weight_sync.planner import wire
from rlflow.training.weight_sync.shards import TensorViews


class Gather:
    """Called as a Resharder is. Its extra memory is that of the largest tensor, twice."""

    def __init__(
        self, source: WeightLayout, target: WeightLayout, rank: int, pieces: Mapping[str, TensorViews], views: Mapping[str, TensorViews],
        group: dist.ProcessGroup | None = None, device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        for name in target.tensors:
            check_tiles(name, source.tensors[name])
        self.source, self.target, self.rank, self.pieces, self.views = source, target, rank, pieces, views
        self.group, self.device, self.version, self.received = group, torch.device(device), -1, 0

    def run(self, version: int) -> None:
        """One all-gather for each tensor."""
        for name in self.target.tensors:
            whole = self._whole(name)
            for piece in self.views[name].pieces:
                piece.view.copy_(whole[within(piece.box, tuple((0, size) for size in whole.shape))] if piece.box else whole)
        self.version = version

    def _whole(self, name: str) -> Tensor:
        have, dtype = self.source.tensors[name], getattr(torch, wire(self.source.tensors[name].dtype, self.target.tensors[name].dtype))
        room = max(sum(map(volume, boxes)) for boxes in have.boxes)
        padded = torch.zeros(room, dtype=dtype, device=self.device)
        shards = [piece.view.reshape(-1) for piece in self.pieces[name].pieces] if name in self.pieces else []
        padded[: sum(part.numel() for part in shards)] = torch.cat(shards).to(dtype) if shards else padded[:0]
        everything = [torch.empty_like(padded) for _ in have.boxes]
        raw = [part.view(torch.uint8) for part in everything]
        dist.all_gather(raw, padded.view(torch.uint8), group=self.group)
        self.received += sum(part.numel() for rank, part in enumerate(raw) if rank != self.rank)
        whole = torch.empty(have.shape, dtype=dtype, device=self.device)
        for part, boxes in zip(everything, have.boxes, strict=True):
            _place(whole, part, boxes)
        return whole

    def close(self) -> None:
        """Do nothing, since no memory is kept between transfers."""


def _place(whole: Tensor, part: Tensor, boxes: tuple[Box, ...]) -> None:
    done = 0
    for box in boxes:
        view = whole[tuple(slice(low, high) for low, high in box)] if box else whole
        view.copy_(part[done : done + volume(box)].view(lengths(box)))
        done += volume(box)
