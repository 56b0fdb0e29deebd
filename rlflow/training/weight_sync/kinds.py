"""Layouts by their kind, from shapes alone: what a plan is made of before anything is loaded."""

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
    """Tensors cut along a dimension as ``torch.chunk`` does."""

    place: Sequence[int]  # which chunk each rank has, of ``parts``
    parts: int
    dim: Dim = lambda name, shape: 0  # which dimension of a tensor; None leaves it whole


def sharded(shapes: Shapes, dtype: str, cuts: Sequence[Cut], ranks: int = 0) -> WeightLayout:
    """Each cut is made in what the one before has left: tensor parallel first, then FSDP, as on a 2-D mesh.
    No cut at all: replicated over ``ranks``."""
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
    """Every rank holds every tensor whole."""
    return sharded(shapes, dtype, (), ranks)


def flat(shapes: Shapes, dtype: str, ranks: int) -> WeightLayout:
    """DeepSpeed ZeRO-3: each tensor flattened, ceil(numel / ranks) elements for each rank (Rajbhandari et al.
    2020)."""
    spreads: dict[tuple[int, ...], Spread] = {}
    for shape in shapes.values():
        if shape not in spreads:
            spans = [chunk(math.prod(shape), rank, ranks) for rank in range(ranks)]
            spreads[shape] = Spread(shape, dtype, tuple(tuple(flat_boxes(shape, *span)) for span in spans))
    return WeightLayout(ranks, {name: spreads[shape] for name, shape in shapes.items()})


def row_parallel(name: str, shape: tuple[int, ...]) -> int | None:
    """How tensor parallelism cuts a dense decoder (Shoeybi et al. 2019): o_proj and down_proj along their
    inputs, other matrices along their outputs or vocabulary, vectors not at all. For estimates; what an
    engine really does is traced."""
    if len(shape) < 2:
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def tensor_parallel(shapes: Shapes, dtype: str, size: int, ranks: int) -> WeightLayout:
    """``ranks / size`` replicas of a model cut in ``size``, each on adjacent ranks."""
    return sharded(shapes, dtype, [Cut([rank % size for rank in range(ranks)], size, row_parallel)])
