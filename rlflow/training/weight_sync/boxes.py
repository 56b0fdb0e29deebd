"""Boxes: rectangular blocks of a tensor's elements, given as one half-open range per dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence

Box = tuple[tuple[int, int], ...]


def whole(shape: Sequence[int]) -> Box:
    """Return the box that contains all elements of a tensor with this shape."""
    return tuple((0, size) for size in shape)


def lengths(box: Box) -> tuple[int, ...]:
    """Return how many elements the box has along each dimension."""
    return tuple(high - low for low, high in box)


def volume(box: Box) -> int:
    """Return how many elements the box has. The box of a scalar has 1."""
    return math.prod(max(0, high - low) for low, high in box)


def overlap(one: Box, other: Box) -> Box:
    """Return the box of elements that both boxes contain. Its volume is 0 if there are none."""
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))


def within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select the box ``inner`` from a tensor that holds the box ``outer``."""
    return tuple(
        slice(low - start, high - start) for (low, high), (start, _) in zip(inner, outer, strict=True)
    )


def contains(outer: Box, inner: Box) -> bool:
    """Return True if the box ``outer`` contains all of the box ``inner``."""
    return all(a <= c and d <= b for (a, b), (c, d) in zip(outer, inner, strict=True))


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Return boxes that together contain elements ``start`` to ``stop`` (exclusive) of a tensor, in row-major
    order. There are at most 2 ndim - 1 of them, and each is contiguous."""
    if stop <= start:
        return []
    if len(shape) <= 1:
        return [((start, stop),) if shape else ()]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and (start % row or stop % row):
        return _in_row(shape, first, start % row, stop - first * row)
    head = _in_row(shape, first, start % row, row) if start % row else []
    tail = _in_row(shape, last, 0, stop % row) if stop % row else []
    low, high = first + bool(head), last + (not tail)
    return head + ([((low, high), *whole(shape[1:]))] if low < high else []) + tail


def _in_row(shape: Sequence[int], row: int, start: int, stop: int) -> list[Box]:
    return [((row, row + 1), *rest) for rest in flat_boxes(shape[1:], start, stop)]


def chunk(size: int, index: int, parts: int) -> tuple[int, int]:
    """Return (start, stop) of chunk ``index`` when ``size`` elements are split into ``parts`` chunks like
    ``torch.chunk`` does. Each chunk has ceil(size / parts) elements, except that the last ones are shorter or
    empty."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)
