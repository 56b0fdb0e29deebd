"""Compute layouts from tensor shapes and a kind of sharding, for plans that are made before anything is
loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlflow.training.weight_sync.boxes import Box, chunk, flat_boxes, volume, whole
from rlflow.training.weight_sync.layout import Spread, WeightLayout

Shapes = Mapping[str, tuple[int, ...]]
Dim = Callable[[str, tuple[int, ...]], int | None]


@dataclass(frozen=True)
class Cut:
    """A split of tensors along one dimension, as by ``torch.chunk``, and which chunk each rank holds."""

    place: Sequence[int]  # the number of each rank's chunk, below ``parts``
    parts: int
    dim: Dim = lambda name, shape: 0  # the dimension to divide; None: not divided


def sharded(shapes: Shapes, dtype: str, cuts: Sequence[Cut], ranks: int = 0) -> WeightLayout:
    """Return the layout of tensors, given their ``shapes`` by name, after one or more splits.

    Each cut splits the pieces of the one before it: for example, first tensor parallelism, then FSDP, as on a
    2-D mesh. Without cuts, each of ``ranks`` ranks holds every tensor.
    """
    ranks = len(cuts[0].place) if cuts else ranks
    spreads: dict[tuple[object, ...], Spread] = {}
    tensors = {}
    for name, shape in shapes.items():
        dims = tuple(cut.dim(name, shape) if shape else None for cut in cuts)
        if (shape, dims) not in spreads:
            boxes = tuple(
                _boxes(shape, [(cut, dim, rank) for cut, dim in zip(cuts, dims, strict=True)])
                for rank in range(ranks)
            )
            spreads[shape, dims] = Spread(shape, dtype, boxes)
        tensors[name] = spreads[shape, dims]
    return WeightLayout(ranks, tensors)


def _boxes(shape: tuple[int, ...], cuts: Sequence[tuple[Cut, int | None, int]]) -> tuple[Box, ...]:
    box = list(whole(shape))
    for cut, dim, rank in cuts:
        if dim is not None:
            start, stop = box[dim]
            low, high = chunk(stop - start, cut.place[rank], cut.parts)
            box[dim] = (start + low, start + high)
    return (tuple(box),) if volume(tuple(box)) else ()


def replicated(shapes: Shapes, dtype: str, ranks: int) -> WeightLayout:
    """Return the layout in which every rank holds all tensors in full."""
    return sharded(shapes, dtype, (), ranks)


def flat(shapes: Shapes, dtype: str, ranks: int) -> WeightLayout:
    """Return the layout of DeepSpeed's ZeRO-3, in which each tensor is flattened and each rank holds
    ceil(numel / ranks) of its elements (Rajbhandari et al. 2020)."""
    spreads: dict[tuple[int, ...], Spread] = {}
    for shape in shapes.values():
        if shape not in spreads:
            spans = [chunk(math.prod(shape), rank, ranks) for rank in range(ranks)]
            spreads[shape] = Spread(shape, dtype, tuple(tuple(flat_boxes(shape, *span)) for span in spans))
    return WeightLayout(ranks, {name: spreads[shape] for name, shape in shapes.items()})


def row_parallel(name: str, shape: tuple[int, ...]) -> int | None:
    """Return the dimension along which tensor parallelism splits a weight of a dense decoder (Shoeybi et al.
    2019), or None if it isn't split.

    o_proj and down_proj are split along their inputs, other matrices along their outputs or vocabulary, and
    vectors not at all. Use this only for estimates; the layout of a real engine is traced.
    """
    if len(shape) < 2:
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def tensor_parallel(shapes: Shapes, dtype: str, size: int, ranks: int) -> WeightLayout:
    """Return the layout of ``ranks / size`` tensor-parallel replicas of a model, each split across ``size``
    neighbouring ranks."""
    return sharded(shapes, dtype, [Cut([rank % size for rank in range(ranks)], size, row_parallel)])
