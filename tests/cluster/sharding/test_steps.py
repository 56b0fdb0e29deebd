"""Optimizer steps over ranks: on any number of ranks, each step learns from the same rows, in the same
order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.cluster.sharding.steps import rank_steps

ROWS = st.lists(
    st.tuples(st.booleans(), st.integers(1, 9), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=14
)


def facts(rows):
    """Return a group for each entry (bad, tokens that count, more tokens, rows of the group), as int64 [rows,
    4]."""
    groups = [number for number, row in enumerate(rows) for _ in range(row[3])][: len(rows)]
    return torch.tensor(
        [[bad, count, count + more, group] for (bad, count, more, _), group in zip(rows, groups, strict=True)]
    )


def learned(plan):
    """Return for each step the rows that all ranks learn from, and the total tokens and rows as each rank has
    them."""
    found = []
    for step in zip(*plan.steps, strict=True):
        rows = [
            rank[torch.from_numpy(places)].tolist() for rank, (places, _) in zip(plan.rows, step, strict=True)
        ]
        found.append((rows, {totals for _, totals in step}))
    return found


@given(
    rows=ROWS,
    ranks=st.integers(1, 5),
    by_group=st.booleans(),
    epochs=st.integers(1, 3),
    minibatch=st.none() | st.integers(1, 6),
)
def test_a_step_has_the_same_rows_on_any_number_of_ranks(rows, ranks, by_group, epochs, minibatch):
    table = facts(rows)
    settings = {"seed": 3, "epochs": epochs, "minibatch": minibatch}
    plan, alone = rank_steps(table, by_group, ranks, **settings), rank_steps(table, by_group, 1, **settings)
    steps, whole = learned(plan), learned(alone)
    assert plan.left_out == alone.left_out
    assert len(steps) == len(whole)
    for (parts, totals), ([everything], only) in zip(steps, whole, strict=True):
        assert sorted(row for part in parts for row in part) == sorted(everything)
        assert totals == only == {(int(table[everything, 1].sum()), len(everything))}


@given(rows=ROWS, ranks=st.integers(1, 5), by_group=st.booleans())
def test_every_usable_row_is_used_once_per_epoch(rows, ranks, by_group):
    table = facts(rows)
    bad = table[:, 0].bool()
    if by_group:  # one bad row makes its group bad
        bad = torch.tensor([bool(bad[table[:, 3] == group].any()) for group in table[:, 3].tolist()])
    plan = rank_steps(table, by_group, ranks, seed=1, epochs=2, minibatch=3)
    times = [row for parts, _ in learned(plan) for part in parts for row in part]
    assert sorted(times) == sorted(2 * (~bad).nonzero()[:, 0].tolist())
    assert plan.left_out == int(bad.sum())


@given(rows=ROWS, ranks=st.integers(1, 5))
def test_a_rank_gets_each_needed_row_once_and_in_order(rows, ranks):
    plan = rank_steps(facts(rows), False, ranks, seed=2, epochs=3, minibatch=4)
    for mine, steps in zip(plan.rows, plan.steps, strict=True):
        needed = sorted({int(mine[place]) for places, _ in steps for place in places})
        assert mine.tolist() == needed


@given(rows=ROWS, ranks=st.integers(2, 5))
def test_rows_of_a_group_stay_together_in_a_step(rows, ranks):
    table = facts(rows)
    for parts, _ in learned(rank_steps(table, True, ranks, seed=4, minibatch=5)):
        homes = {}
        for rank, part in enumerate(parts):
            for row in part:
                homes.setdefault(int(table[row, 3]), set()).add(rank)
        assert all(len(ranks) == 1 for ranks in homes.values())


def test_a_step_is_split_by_tokens():
    table = torch.tensor([[0, 1, tokens, number] for number, tokens in enumerate([8, 1, 1, 1, 1, 1, 1, 2])])
    [(parts, _)] = learned(rank_steps(table, False, 2, seed=0))
    assert sorted(sorted(part) for part in parts) == [[0], list(range(1, 8))]
