"""Use digests to check that every destination holds the trainers' weights. A tensor's digest doesn't depend
on its layout."""

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

ROWS = 1 << 16  # elements processed at once; with more, each step would request new memory from the system
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest(values: Tensor, box: Box) -> int:
    """Return the digest of a box's elements as a signed 64-bit integer. The digest of a larger box is the sum
    of the digests of its parts.

    values: the elements, in the shape of the box and with any strides.
    """
    if not values.numel():
        return 0
    if not box:
        return wrapped(int(bits(values)) * int(coefficients(0, 1)[0]))
    rows = max(1, ROWS * values.shape[0] // values.numel())
    parts = [_summed(part, box) for part in torch.split(values, rows)]
    return int((torch.cat(parts) * _coefficients(0, box[0], values.device)).sum())


def _summed(values: Tensor, box: Box) -> Tensor:
    """Return [rows]: each row's term in the digest (a row is an index of the first dimension), before it is
    multiplied by the row's coefficient."""
    terms = bits(values).to(torch.int64)
    for dim in range(values.dim() - 1, 0, -1):
        terms = (terms * _coefficients(dim, box[dim], values.device)).sum(-1)
    return terms


def bits(values: Tensor) -> Tensor:
    """Reinterpret the values as signed integers with the same bits."""
    return values.detach().contiguous().view(_INTEGERS[values.element_size()])


def _coefficients(dim: int, span: tuple[int, int], device: torch.device) -> Tensor:
    low, high = span
    return coefficients(dim, 1 << (high - 1).bit_length())[low:high].to(device)


@lru_cache(maxsize=64)
def coefficients(dim: int, size: int) -> Tensor:
    """Return odd pseudorandom numbers (splitmix64) for the positions along dimension ``dim``, int64 [size].
    The n-th number doesn't depend on ``size``."""
    return splitmix((torch.arange(size) + (dim << 40)) * GOLDEN) | 1


def wrapped(number: int) -> int:
    """Return the number modulo 2^64 as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


class Verifier:
    """Compares digests of weights after a transfer.

    For each distinct box that a rank needs, the trainers together compute a digest, in which each element is
    counted by only one of the ranks that hold it. Every rank then compares this digest with that of its own
    copy of the box. This checks each replica while sending only one number per box.
    """

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
        """The number of each distinct (tensor name, box) that a rank needs, which is the same on all
        ranks."""
        boxes = ((name, box) for name, spread in self.plan.target.tensors.items() for box in spread.holders())
        return {key: index for index, key in enumerate(boxes)}

    @cached_property
    def _counted(self) -> dict[str, list[Box]]:
        """The boxes that this rank counts in the digests, by tensor name, because it is the first rank that
        holds them."""
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
        """Compare digests on all ranks, raising TransferError on any rank whose copies differ. ``total`` sums
        a tensor over all ranks."""
        self.compare(total(self.terms()))

    def terms(self) -> Tensor:
        """Return what this rank contributes to the digest of each distinct box, int64 [boxes]. A digest is
        the sum over all ranks, with wraparound."""
        return torch.tensor([self._sent(name, box) for name, box in self._boxes], dtype=torch.int64)

    def compare(self, sums: Tensor) -> None:
        """Compare the digests of this rank's copies with ``sums``, the trainers' digest of each box. Raises
        TransferError, naming the tensors, if any differ."""
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
