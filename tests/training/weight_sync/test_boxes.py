"""Boxes of flat ranges and of strided views, compared element by element."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.training.weight_sync.boxes import chunk, contains, flat_boxes, overlap, volume, whole, within
from rlflow.training.weight_sync.strides import StridedAxis, Untraceable, places

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


def numbered(shape):
    """Return a tensor whose elements are their positions in memory."""
    return torch.arange(math.prod(shape)).reshape(shape)


def at(tensor, box):
    return tensor[tuple(slice(low, high) for low, high in box)]


# -- flat ranges
# ------------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(SHAPES, st.data())
def test_a_flat_range_is_a_few_boxes_in_memory_order(shape, data):
    size = math.prod(shape)
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    boxes = flat_boxes(shape, start, stop)
    elements = [at(numbered(shape), box).flatten().tolist() for box in boxes]
    assert list(itertools.chain(*elements)) == list(range(start, stop))
    assert all(own == list(range(own[0], own[0] + len(own))) for own in elements)
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert [volume(box) for box in boxes] == [len(own) for own in elements]


def test_a_part_of_a_later_row_is_one_box():
    """A share of a flat optimizer state may be such a part."""
    assert flat_boxes((4, 6), 13, 16) == [((2, 3), (1, 4))]
    assert flat_boxes((2, 3, 4), 17, 19) == [((1, 2), (1, 2), (1, 3))]
    assert flat_boxes((4, 6), 6, 18) == [((1, 3), (0, 6))]
    assert flat_boxes((), 0, 1) == [()]
    assert flat_boxes((4, 6), 5, 5) == []


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 3), st.data())
def test_box_relations_match_those_of_element_sets(dims, data):
    spans = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda ends: (min(ends), max(ends)))
    one, other = (tuple(data.draw(spans) for _ in range(dims)) for _ in range(2))
    elements = [set(itertools.product(*(range(low, high) for low, high in box))) for box in (one, other)]
    both = overlap(one, other)
    assert volume(both) == len(elements[0] & elements[1])
    if volume(other):
        assert contains(one, other) == (elements[1] <= elements[0])
    if volume(both):
        tensor = numbered((6,) * dims)
        assert torch.equal(at(tensor, one)[within(both, one)], at(tensor, both))
    assert volume(whole((6,) * dims)) == 6**dims


@given(st.integers(0, 20), st.integers(1, 6))
def test_chunks_match_those_of_torch(size, parts):
    ranges = [chunk(size, index, parts) for index in range(parts)]
    expected = [piece.tolist() for piece in torch.arange(size).chunk(parts)] if size else []
    assert [list(range(*one)) for one in ranges if one[0] < one[1]] == expected


# -- strided views
# ------------------------------------------------------------------------------------------------------------


def copied(shape, view, out):
    """Return the copies that write ``out`` from ``view`` of a tensor of this shape, applied."""
    base = numbered(shape)
    axes = [StridedAxis(*axis) for axis in zip(view.shape, view.stride(), out.stride(), strict=True)]
    memory = torch.full((out.untyped_storage().nbytes() // out.element_size(),), -1)
    found = list(places(shape, view.storage_offset(), axes, out.storage_offset()))
    for place in found:
        sizes = tuple(high - low for low, high in place.box)
        memory.as_strided(sizes, place.strides, place.offset).copy_(at(base, place.box))
    return found, memory.as_strided(out.shape, out.stride(), out.storage_offset())


VIEWS = {
    "whole": lambda t: t,
    "rows": lambda t: t[2:5],
    "one row": lambda t: t[3:4],
    "columns": lambda t: t[:, 1:3],
    "a part of both": lambda t: t[1:4, 2:6],
    "transposed": lambda t: t.t(),
    "a part transposed": lambda t: t[1:5, 2:4].t(),
    "heads": lambda t: t.view(2, 3, 6),
    "heads changed": lambda t: t.view(2, 3, 6).transpose(0, 1),
    "split columns": lambda t: t.view(6, 2, 3).transpose(1, 2),
    "joined": lambda t: t.view(36),
    "joined rows": lambda t: t.view(6, 3, 2).flatten(0, 1),
    "a part of what was joined": lambda t: t.view(36)[12:24],
    "repeated": lambda t: t[None].expand(3, 6, 6),
    "every other row": lambda t: t[::2],
    "every other column": lambda t: t[:, 1::2],
    "a diagonal of blocks": lambda t: t.view(3, 2, 3, 2)[1, :, 1, :],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("into", ["contiguous", "transposed", "a part of something larger"])
def test_a_copy_of_a_view_consists_of_boxes(name, into):
    view = VIEWS[name](numbered((6, 6)))
    out = {
        "contiguous": lambda: torch.empty(view.shape, dtype=torch.int64),
        "transposed": lambda: torch.empty(tuple(view.shape)[::-1], dtype=torch.int64).permute(
            *reversed(range(view.dim()))
        ),
        "a part of something larger": lambda: torch.empty(
            (view.shape[0] + 4, *view.shape[1:]), dtype=torch.int64
        )[3:-1],
    }[into]()
    found, written = copied((6, 6), view, out)
    assert torch.equal(written, view)
    assert len(found) <= 6  # no view here needs more than one box per row


NO_BOXES = {
    "over the ends of rows": lambda t: t.view(24)[0:20],
    "one element over": lambda t: t.view(24)[0:7],
    "from the middle of a row": lambda t: t.view(24)[3:15],
    "a diagonal": lambda t: t.diagonal(),
    "steps that do not fit": lambda t: t.view(24)[::4],
}


@pytest.mark.parametrize("name", NO_BOXES)
def test_a_view_without_boxes_is_refused(name):
    view = NO_BOXES[name](numbered((4, 6)))
    with pytest.raises(Untraceable):
        copied((4, 6), view, torch.empty(view.shape, dtype=torch.int64))


def test_a_dimension_of_one_element_is_ignored():
    """Its stride may have any value; the stride of the next dimension would also fit."""
    for shape in ((4, 1, 6), (1, 4, 6), (4, 6, 1)):
        view = numbered(shape)
        found, written = copied(shape, view, torch.empty(shape, dtype=torch.int64))
        assert torch.equal(written, view)
        assert [place.box for place in found] == [whole(shape)]
        flat = view.reshape(24)
        found, written = copied(shape, flat, torch.empty(24, dtype=torch.int64))
        assert torch.equal(written, flat)
        assert [place.box for place in found] == [whole(shape)]


def test_more_boxes_than_the_limit_are_refused():
    view = numbered((2, 2))[None].expand(4097, 2, 2)
    with pytest.raises(Untraceable, match="more than 4096 boxes"):
        copied((2, 2), view, torch.empty(view.shape, dtype=torch.int64))
    assert len(copied((2, 2), view[:4096], torch.empty((4096, 2, 2), dtype=torch.int64))[0]) == 4096
