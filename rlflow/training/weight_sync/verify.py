"""Check by digests that every destination holds the trainers' weights.

The digest of a tensor does not depend on its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from rlflow.author.seeds import GOLDEN, splitmix
from rlflow.training.weight_sync.boxes import Box, overlap, volume
from rlflow.training.weight_sync.shards import TensorViews
from rlflow.training.weight_sync.transfer_plan import TransferPlan
from rlflow.training.weight_sync.transport import TransferError

ROWS = 1 << 16  # elements processed at once: with more, each step would allocate new memory from the system
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(values: Tensor, box: Box) -> int:
    """Return the digest of the elements of a box, a signed 64-bit integer: one term of the tensor's digest.
    ``values`` has the shape of the box and any strides."""
    if not values.numel():
        return 0
    if not box:
        return wrapped(int(bits(values)) * int(coefficients(0, 1)[0]))
    rows = max(1, ROWS * values.shape[0] // values.numel())
    parts = [_summed(part, box) for part in torch.split(values, rows)]
    return int((torch.cat(parts) * _coefficients(0, box[0], values.device)).sum())


def _summed(values: Tensor, box: Box) -> Tensor:
    """Return [rows]: the terms of each row, without the coefficient of the row."""
    terms = bits(values).to(torch.int64)
    for dim in range(values.dim() - 1, 0, -1):
        terms = (terms * _coefficients(dim, box[dim], values.device)).sum(-1)
    return terms


def bits(values: Tensor) -> Tensor:
    """Return signed integers with the same bits."""
    return values.detach().contiguous().view(_INTEGERS[values.element_size()])


def _coefficients(dim: int, span: tuple[int, int], device: torch.device) -> Tensor:
    low, high = span
    return coefficients(dim, 1 << (high - 1).bit_length())[low:high].to(device)


@lru_cache(maxsize=64)
def coefficients(dim: int, size: int) -> Tensor:
    """Return [size] odd numbers by splitmix64. The n-th number does not depend on ``size``."""
    return splitmix((torch.arange(size) + (dim << 40)) * GOLDEN) | 1


def wrapped(number: int) -> int:
    """Return the number modulo 2^64, as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


class Verifier:
    """Compares digests of weights. For each distinct box that any rank needs, the trainers compute a digest
    from their parts; each element counts on one rank only. Every rank compares this digest with the digests
    of its own copies. So each replica is checked, and only one number per box is sent."""

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        source: Mapping[str, TensorViews],
        target: Mapping[str, TensorViews],
    ) -> None:
        self.plan, self.rank, self.source, self.target = plan, rank, source, target

    @cached_property
    def _boxes(self) -> dict[tuple[str, Box], int]:
        """The distinct boxes that ranks need, with the same numbers on all ranks."""
        boxes = ((name, box) for name, spread in self.plan.target.tensors.items() for box in spread.holders())
        return {key: index for index, key in enumerate(boxes)}

    @cached_property
    def _counted(self) -> dict[str, list[Box]]:
        """The boxes whose first holder is this rank, by tensor name. This rank adds them to the digest."""
        names = self.plan.target.tensors
        return {
            name: [
                box
                for box, ranks in self.plan.source.tensors[name].holders().items()
                if ranks[0] == self.rank
            ]
            for name in names
        }

    def check(self, total: Callable[[Tensor], Tensor]) -> None:
        """Compare digests on all ranks. total: sums a tensor over the ranks."""
        self.compare(total(self.terms()))

    def terms(self) -> Tensor:
        """Return int64 [boxes]: this rank's term in the digest of each distinct box. Sums over the ranks wrap
        around."""
        return torch.tensor([self._sent(name, box) for name, box in self._boxes], dtype=torch.int64)

    def compare(self, sums: Tensor) -> None:
        """Raise TransferError that names the tensors that differ on this rank. sums: the trainers' digest of
        each box."""
        expected = sums.tolist()
        wrong = [
            f"{name} {list(piece.box)}"
            for name, views in self.target.items()
            for piece in views.pieces
            if volume(piece.box) and digest(piece.view, piece.box) != expected[self._boxes[name, piece.box]]
        ]
        if wrong:
            more = f", and {len(wrong) - 4} more" if len(wrong) > 4 else ""
            raise TransferError(
                f"rank {self.rank} does not hold the trainers' weights: {', '.join(wrong[:4])}{more}"
            )

    def _sent(self, name: str, box: Box) -> int:
        dtype = getattr(torch, self.plan.target.tensors[name].dtype)
        total = 0
        for owned in self._counted[name]:
            if volume(common := overlap(owned, box)):
                total += digest(self.source[name].around(common)[0].at(common).to(dtype), common)
        return wrapped(total)
