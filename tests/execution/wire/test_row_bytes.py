"""Saved rows remember the ranks that stored them, and come back to these ranks, or to others if they changed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.author.batch import Batch
from rlflow.execution.wire.row_bytes import RowRanks, opened, packed

ROWS = Batch.of(tokens=[[1, 2], [], [3]], group=[4, 4, 5], finish=["stop", "length", "stop"], beta=0.5)


@given(st.lists(st.integers(0, 2), max_size=9))
def test_each_row_returns_to_its_rank(ranks):
    split = [torch.tensor([i for i, rank in enumerate(ranks) if rank == n]).long() for n in range(3)]
    again = RowRanks.of(split, len(ranks)).split(3)
    assert [part.tolist() for part in again] == [part.tolist() for part in split]
    assert RowRanks.of(split, len(ranks)).split(2) is None


@pytest.mark.parametrize("ranks", [None, RowRanks(torch.tensor([1, 0, 1]), 2)])
def test_ranks_are_saved_with_the_rows_and_are_no_columns_of_theirs(ranks):
    rows, found = RowRanks.taken(opened(packed(ROWS if ranks is None else ranks.noted(ROWS))))
    assert list(rows.data) == list(ROWS.data)
    assert rows.data["tokens"].lists() == [[1, 2], [], [3]]
    assert (found is None) == (ranks is None)
    if ranks is not None:
        assert (found.rank.tolist(), found.ranks) == ([1, 0, 1], 2)
