"""Whether what lies in every destination is what the trainers hold, by digests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor

from rlflow.training.weight_sync.boxes import Box, overlap, volume
from rlflow.training.weight_sync.digest import digest, wrapped
from rlflow.training.weight_sync.plan import TransferPlan
from rlflow.training.weight_sync.shards import TensorViews
from rlflow.training.weight_sync.transport import TransferError


class Verifier:
    """Compares digests of weights. For each distinct box that any rank needs, the trainers make a digest of their parts, each element
    counted on one rank. Every rank compares it with the digests of its own copies, so each replica is checked, and one number per box is
    sent."""

    def __init__(self, plan: TransferPlan, rank: int, source: Mapping[str, TensorViews], target: Mapping[str, TensorViews]) -> None:
        self.plan, self.rank, self.source, self.target = plan, rank, source, target

    @cached_property
    def _boxes(self) -> dict[tuple[str, Box], int]:
        """The distinct boxes that ranks need, numbered alike on all ranks."""
        boxes = ((name, box) for name, spread in self.plan.target.tensors.items() for box in spread.holders())
        return {key: index for index, key in enumerate(boxes)}

    @cached_property
    def _counted(self) -> dict[str, list[Box]]:
        """The boxes for which this rank adds to the digest, since it is their first holder; by tensor name."""
        names = self.plan.target.tensors
        return {name: [box for box, ranks in self.plan.source.tensors[name].holders().items() if ranks[0] == self.rank] for name in names}

    def check(self, total: Callable[[Tensor], Tensor]) -> None:
        """total: sums over the ranks."""
        self.compare(total(self.terms()))

    def terms(self) -> Tensor:
        """int64: of each distinct box the part of its digest that this rank speaks for. Their sums over the ranks wrap around."""
        return torch.tensor([self._sent(name, box) for name, box in self._boxes], dtype=torch.int64)

    def compare(self, sums: Tensor) -> None:
        """Raises TransferError with the tensors that differ here."""
        expected = sums.tolist()
        wrong = [f"{name} {list(piece.box)}" for name, views in self.target.items() for piece in views.pieces
                 if volume(piece.box) and digest(piece.view, piece.box) != expected[self._boxes[name, piece.box]]]  # fmt: skip
        if wrong:
            more = f", and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise TransferError(f"rank {self.rank} does not hold what the trainers hold: {', '.join(wrong[:4])}{more}")

    def _sent(self, name: str, box: Box) -> int:
        dtype = getattr(torch, self.plan.target.tensors[name].dtype)
        total = 0
        for owned in self._counted[name]:
            if volume(common := overlap(owned, box)):
                total += digest(self.source[name].around(common)[0].at(common).to(dtype), common)
        return wrapped(total)
