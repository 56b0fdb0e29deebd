"""Find the boxes of a tensor that a strided copy reads, and where it writes each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlflow.training.weight_sync.boxes import Box

MOST = 4096  # maximum boxes of one view; a view with more boxes is a shuffle rather than a layout


class Untraceable(Exception):
    """Raised if a strided view can't be split into boxes."""


@dataclass(frozen=True)
class StridedAxis:
    """One dimension of a strided copy: its size, and its strides, in elements, in the tensors read and
    written."""

    size: int
    read: int
    written: int


@dataclass(frozen=True)
class CopiedBox:
    """A box of the tensor that is read, and the strides and offset, in elements, of the view that is written.
    The view has the same sizes as the box."""

    box: Box
    strides: tuple[int, ...]
    offset: int


def places(
    shape: Sequence[int], offset: int, axes: Sequence[StridedAxis], written: int
) -> Iterator[CopiedBox]:
    """Yield the boxes that a strided copy reads, and where each one is written.

    shape: the shape of the contiguous tensor that is read. offset: the first element that is read. axes: the
    dimensions of the copy. written: the first element that is written. The copied view may be narrowed,
    transposed, split, joined or repeated. Raises Untraceable if it can't be split into at most MOST boxes.
    """
    rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    start = [offset // row % size for row, size in zip(rows, shape, strict=True)]
    runs: list[StridedAxis] = [StridedAxis(1, row, 0) for row in rows]
    outer: list[StridedAxis] = []
    for dim, axis in _by_dimension(shape, rows, start, axes):
        if dim is not None and _continues(runs[dim], axis):
            runs[dim] = StridedAxis(
                runs[dim].size * axis.size,
                rows[dim],
                runs[dim].written if runs[dim].size > 1 else axis.written,
            )
        else:
            outer.append(axis)
    if math.prod(axis.size for axis in outer) > MOST:
        raise Untraceable(f"more than {MOST} boxes")
    for steps in itertools.product(*(range(axis.size) for axis in outer)):
        first = offset + sum(step * axis.read for step, axis in zip(steps, outer, strict=True))
        low = [first // row % size for row, size in zip(rows, shape, strict=True)]
        box = tuple((at, at + run.size) for at, run in zip(low, runs, strict=True))
        yield CopiedBox(
            box,
            tuple(run.written for run in runs),
            written + sum(s * a.written for s, a in zip(steps, outer, strict=True)),
        )


def _continues(run: StridedAxis, axis: StridedAxis) -> bool:
    """Return True if ``axis`` merely continues ``run``, so that the two can be joined: in both tensors, a
    step along ``axis`` leads from the end of one run to the beginning of the next."""
    return axis.read == run.read * run.size and (run.size == 1 or axis.written == run.written * run.size)


def _by_dimension(
    shape: Sequence[int], rows: Sequence[int], start: Sequence[int], axes: Sequence[StridedAxis]
) -> Iterator[tuple[int | None, StridedAxis]]:
    """Yield (dimension, axis) for each axis, sorted by stride, after splitting any axis that spans several
    dimensions. The dimension is None for an axis that repeats the tensor."""
    by_dimension: list[tuple[int | None, StridedAxis]] = []
    for axis in axes:
        if axis.size > 1:
            by_dimension += [(None, axis)] if not axis.read else _split(shape, rows, start, axis)
    yield from sorted(by_dimension, key=lambda pair: pair[1].read)


def _split(
    shape: Sequence[int], rows: Sequence[int], start: Sequence[int], axis: StridedAxis
) -> Iterator[tuple[int, StridedAxis]]:
    """Split an axis that spans several dimensions of the tensor, yielding (dimension, axis) for each of
    them."""
    dim = next(dim for dim in range(len(shape)) if rows[dim] <= axis.read)
    step, rest = divmod(axis.read, rows[dim])
    if rest:
        raise Untraceable(f"steps of {axis.read} elements in a tensor of shape {list(shape)}")
    if start[dim] + (axis.size - 1) * step < shape[dim]:
        yield dim, axis
        return
    whole = shape[dim] // step
    if start[dim] or shape[dim] % step or axis.size % whole:
        raise Untraceable(
            f"{axis.size} elements over the end of dimension {dim} of a tensor of shape {list(shape)}"
        )
    yield dim, StridedAxis(whole, axis.read, axis.written)
    yield from _split(
        shape, rows, start, StridedAxis(axis.size // whole, axis.read * whole, axis.written * whole)
    )
