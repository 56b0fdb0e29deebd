"""Chunks of rows, in the order in which the rows end."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.training.chunks import chunked


@st.composite
def endings(draw):
    """Draw rows in the order in which they end, cut into portions."""
    order = draw(st.permutations(range(draw(st.integers(0, 40)))))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=8)))
    return [
        torch.tensor(order[a:b], dtype=torch.int64)
        for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)
    ]


@given(endings(), st.integers(1, 50))
def test_every_row_is_in_one_chunk_and_chunks_end_in_order(portions, count):
    order = torch.cat(portions).tolist()
    chunks = [chunk.tolist() for chunk in chunked(portions, len(order), count)]
    assert len(chunks) == count
    assert max(map(len, chunks)) - min(map(len, chunks)) <= 1
    start = 0
    for chunk in chunks:
        assert chunk == sorted(order[start : start + len(chunk)])
        start += len(chunk)
    assert start == len(order)


@given(endings(), st.integers(1, 50))
def test_chunks_do_not_depend_on_the_portions(portions, count):
    rows = torch.cat(portions)
    one, other = (list(chunked(given, len(rows), count)) for given in (portions, [rows]))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_chunk_is_ready_when_its_last_row_ends():
    ended = []

    def portions():
        for row in (3, 0, 1, 2):
            ended.append(row)
            yield torch.tensor([row])

    seen = [(chunk.tolist(), len(ended)) for chunk in chunked(portions(), 4, 2)]
    assert seen == [([0, 3], 2), ([1, 2], 4)]


@pytest.mark.parametrize(("portions", "found"), [([[0]], 1), ([[0], [1, 0]], 3)])
def test_rows_without_an_end_are_an_error(portions, found):
    with pytest.raises(ValueError, match=f"found {found} rows that ended, expected 2"):
        list(chunked(map(torch.tensor, portions), 2, 2))
