"""Which ranks are asked with which rows, where several compute as one."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.cluster.teams import asked, first_ranks, teams, used
from rlflow.placement import Parallel


@st.composite
def lying_splits(draw):
    """Rows over ranks, and how a half lies on them."""
    lies = Parallel(draw(st.integers(1, 4)), draw(st.booleans()))
    ranks = draw(st.integers(1, 3)) * lies.tensor
    owner = torch.tensor(draw(st.lists(st.integers(0, ranks - 1), max_size=30)), dtype=torch.int64)
    return [(owner == rank).nonzero()[:, 0] for rank in range(ranks)], lies


@given(lying_splits())
def test_every_row_is_asked_of_one_whole_team_and_kept_once(case):
    ranks, lies = case
    split = first_ranks(teams(ranks, lies), lies)
    assert torch.cat(split).sort().values.tolist() == list(range(sum(map(len, ranks))))
    told = asked(split, lies)
    for rank, rows in told.items():
        first = rank - rank % lies.tensor
        assert rows is told[first] is split[first]
        assert set(range(first, first + lies.tensor)) <= told.keys()
    assert set(used(split)) <= told.keys()
    assert all(rank % lies.tensor == 0 for rank in used(split))
    if lies.collective:
        assert list(told) == list(range(len(ranks)))


@given(lying_splits())
def test_a_team_keeps_the_rows_of_its_ranks(case):
    ranks, lies = case
    for number, rows in enumerate(teams(ranks, lies)):
        own = ranks[number * lies.tensor : (number + 1) * lies.tensor]
        assert rows.tolist() == sorted(row for part in own for row in part.tolist())
