"""Which ranks get which rows if several ranks compute as one."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.cluster.sharding.tp_groups import asked, first_ranks, teams, used
from rlflow.compiler.placement import Parallel
from rlflow.training.weight_sync.kinds import tensor_parallel


@st.composite
def lying_splits(draw):
    """Draw rows over ranks, and the placement of a side on the ranks."""
    parallel = Parallel(draw(st.integers(1, 4)), draw(st.booleans()))
    ranks = draw(st.integers(1, 3)) * parallel.tensor
    owner = torch.tensor(draw(st.lists(st.integers(0, ranks - 1), max_size=30)), dtype=torch.int64)
    return [(owner == rank).nonzero()[:, 0] for rank in range(ranks)], parallel


@given(lying_splits())
def test_every_row_is_sent_to_one_complete_team(case):
    ranks, parallel = case
    split = first_ranks(teams(ranks, parallel), parallel)
    assert torch.cat(split).sort().values.tolist() == list(range(sum(map(len, ranks))))
    told, team_of = (
        asked(split, parallel),
        {rank: team for team in parallel.teams(len(ranks)) for rank in team},
    )
    for rank, rows in told.items():
        team = team_of[rank]
        assert rows is told[team[0]] is split[team[0]]
        assert set(team) <= told.keys()
    assert set(used(split)) <= told.keys()
    assert set(used(split)) <= {team[0] for team in team_of.values()}
    if parallel.collective:
        assert list(told) == list(range(len(ranks)))


@given(lying_splits())
def test_a_team_keeps_the_rows_of_its_ranks(case):
    ranks, parallel = case
    for team, rows in zip(parallel.teams(len(ranks)), teams(ranks, parallel), strict=True):
        assert rows.tolist() == sorted(row for rank in team for row in ranks[rank].tolist())


@given(st.integers(1, 5), st.integers(1, 5))
def test_teams_contain_every_rank_once(size, count):
    ranks, shapes = size * count, {"q_proj.weight": (size, 3)}
    made = Parallel(size).teams(ranks)
    assert made == [range(k * size, (k + 1) * size) for k in range(count)]
    spread = tensor_parallel(shapes, "float32", size, ranks).tensors["q_proj.weight"]
    assert all(
        spread.boxes[rank] == (((part, part + 1), (0, 3)),) for team in made for part, rank in enumerate(team)
    )
