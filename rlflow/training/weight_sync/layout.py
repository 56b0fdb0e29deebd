"""Layouts of weights: which rank holds which boxes of which tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from pydantic import TypeAdapter

from rlflow.errors import PlanError, listed
from rlflow.training.weight_sync.boxes import Box, contains, overlap, volume, whole

WIDTHS = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True)
class TensorShard:
    """The boxes of a tensor that a rank holds."""

    shape: tuple[int, ...]  # shape of the complete tensor
    dtype: str  # name of the dtype without ``torch.``
    boxes: tuple[Box, ...]  # disjoint


HELD = TypeAdapter(dict[str, TensorShard])  # what ranks exchange: tensor name → shard


@dataclass(frozen=True)
class Spread:
    """The layout of one tensor: the boxes that each rank holds, in rank order."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[tuple[Box, ...], ...]

    @property
    def nbytes(self) -> int:
        """The size of one complete copy of the tensor in bytes."""
        return math.prod(self.shape) * width(self.dtype)

    def holders(self) -> dict[Box, list[int]]:
        """For each distinct non-empty box, return the ranks that hold it."""
        ranks_of: dict[Box, list[int]] = {}
        for rank, boxes in enumerate(self.boxes):
            for box in dict.fromkeys(boxes):
                if volume(box):
                    ranks_of.setdefault(box, []).append(rank)
        return ranks_of


@dataclass(frozen=True)
class WeightLayout:
    """The layouts of all of a model's tensors, by Hugging Face name, in the order in which they are
    transferred. It is hashable, so it can be a key of the plan cache."""

    ranks: int
    tensors: Mapping[str, Spread] = field(hash=False)

    @cached_property
    def _hash(self) -> int:
        return hash((self.ranks, *self.tensors.items()))

    def __hash__(self) -> int:
        return self._hash

    @property
    def nbytes(self) -> int:
        """The size of one complete copy of the model in bytes."""
        return sum(spread.nbytes for spread in self.tensors.values())

    def among(self, before: int, after: int) -> WeightLayout:
        """Return a wider layout that includes ranks of other pools, which hold nothing: ``before`` of them
        come first and ``after`` of them last."""
        padded: dict[tuple[tuple[Box, ...], ...], tuple[tuple[Box, ...], ...]] = {}
        for spread in self.tensors.values():
            padded.setdefault(spread.boxes, (((),) * before) + spread.boxes + (((),) * after))
        wider = {
            name: Spread(spread.shape, spread.dtype, padded[spread.boxes])
            for name, spread in self.tensors.items()
        }
        return WeightLayout(before + self.ranks + after, wider)

    def of(self, rank: int) -> dict[str, TensorShard]:
        """Return the shards that this rank holds, by tensor name."""
        return {
            name: TensorShard(spread.shape, spread.dtype, spread.boxes[rank])
            for name, spread in self.tensors.items()
        }


def join(ranks: Sequence[Mapping[str, TensorShard]]) -> WeightLayout:
    """Combine the shards reported by all ranks into one layout.

    ranks: each rank's shards by tensor name; a rank may leave out tensors. Raises PlanError if ranks report
    different shapes or dtypes for a tensor.
    """
    first: dict[str, tuple[int, TensorShard]] = {}
    for rank, shards in enumerate(ranks):
        for name, shard in shards.items():
            _check_alike(name, rank, shard, *first.setdefault(name, (rank, shard)))
    boxes = {name: tuple(shards[name].boxes if name in shards else () for shards in ranks) for name in first}
    return WeightLayout(
        len(ranks), {name: Spread(one.shape, one.dtype, boxes[name]) for name, (_, one) in first.items()}
    )


def _check_alike(name: str, rank: int, shard: TensorShard, other: int, other_shard: TensorShard) -> None:
    if (shard.shape, shard.dtype) != (other_shard.shape, other_shard.dtype):
        raise PlanError.of(
            "reshard-layout",
            f"ranks {other} and {rank} do not agree on tensor {name!r}",
            found=f"{shard.dtype} {list(shard.shape)} on rank {rank}",
            expected=f"{other_shard.dtype} {list(other_shard.shape)} as on rank {other}",
            remedy="report the shape of the complete tensor, in the checkpoint's coordinates, on every rank",
        )


def width(dtype: str) -> int:
    """Return the size of an element in bytes. Raises PlanError if rlflow can't move tensors of this dtype."""
    if dtype not in WIDTHS:
        raise PlanError.of(
            "reshard-dtype",
            f"weights of dtype {dtype} cannot be moved",
            found=dtype,
            expected=listed(WIDTHS),
            remedy="convert the weights before a layout describes them; a run does so with --dtype bfloat16",
        )
    return WIDTHS[dtype]


def check_tiles(name: str, spread: Spread) -> None:
    """Raise PlanError, naming the tensor and ranks, unless a tensor's distinct boxes cover it exactly and
    without overlap."""
    holders = spread.holders()
    for box, ranks in holders.items():
        if len(box) != len(spread.shape) or not contains(whole(spread.shape), box):
            raise _untiled(
                name,
                spread,
                f"box {list(box)} of rank {ranks[0]} is not inside the shape {list(spread.shape)}",
            )
    covered = sum(map(volume, holders))
    if clash := _first_clash(sorted(holders)):
        one, other = clash
        raise _untiled(
            name,
            spread,
            f"ranks {holders[one][0]} and {holders[other][0]} hold boxes {list(one)} and {list(other)}",
        )
    if covered != math.prod(spread.shape):
        with_some = sorted({rank for ranks in holders.values() for rank in ranks})
        raise _untiled(name, spread, f"{covered} of {math.prod(spread.shape)} elements, on ranks {with_some}")


def _first_clash(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that overlap, or None if none do. ``boxes`` must be sorted."""
    for i, one in enumerate(boxes):
        for other in boxes[i + 1 :]:
            if one and other[0][0] >= one[0][1]:
                break
            if volume(overlap(one, other)):
                return one, other
    return None


def _untiled(name: str, spread: Spread, problem: str) -> PlanError:
    return PlanError.of(
        "reshard-tiles",
        f"the shards of tensor {name!r} do not tile it exactly",
        found=problem,
        expected=f"each element of {list(spread.shape)} in exactly one distinct box; several ranks may hold "
        "the same box",
        remedy="let every training rank report its shards once",
    )
