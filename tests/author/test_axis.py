"""The rows of joined batches, with groups by prompt."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.author.axis import Axis

STEPS = st.lists(st.sampled_from(["choose", "sample", "encode", "ask"]), max_size=4)


def kept(count, keep):
    return torch.tensor([i for i in range(count) if keep >> i % 8 & 1], dtype=torch.int64)


def made(prompts, steps, keep):
    """Return rows made from prompts by these steps, and the prompt of each row."""
    axis, roots = prompts, list(range(len(prompts)))
    for step in steps:
        if step == "sample" and not axis.grouped:
            axis, roots = axis.repeat(2), [root for root in roots for _ in range(2)]
            continue
        index = kept(len(axis), keep)
        make = {"choose": axis.take, "encode": axis.encode, "ask": axis.ask}.get(step, axis.take)
        axis, roots = make(index), [roots[i] for i in index.tolist()]
    return axis, roots


@given(
    st.integers(0, 5), st.lists(st.tuples(STEPS, st.integers(0, 255)), min_size=2, max_size=3), st.booleans()
)
def test_rows_of_one_prompt_form_one_group_in_the_order_of_the_prompts(count, recipes, equal):
    # prompts of equal keys are still different prompts
    prompts = Axis(torch.zeros(count, 2, dtype=torch.int64)) if equal else Axis.fresh(count, 7)
    parts = [made(prompts, steps, keep) for steps, keep in recipes]
    joined = Axis.join_groups([axis for axis, _ in parts])
    assert joined is not None
    axis, order = joined
    rows = [(root, part, row) for part, (_, roots) in enumerate(parts) for row, root in enumerate(roots)]
    expected = sorted(range(len(rows)), key=lambda place: rows[place])
    assert order.tolist() == expected
    roots = [rows[place][0] for place in expected]
    assert axis.group_numbers.tolist() == axis.slots.tolist() == [sorted({*roots}).index(r) for r in roots]
    assert axis.back_to(prompts).tolist() == roots
    assert axis.grouped
    within = axis.keys[:, -1].tolist()
    assert within == [roots[:place].count(root) for place, root in enumerate(roots)]
    paths = [part.keys.tolist() for part, _ in parts]
    assert [key[:-2] for key in axis.keys.tolist()] == [
        (path := paths[rows[place][1]][rows[place][2]]) + [0] * (axis.keys.shape[1] - 2 - len(path))
        for place in expected
    ]


def test_the_nearest_prompts_form_the_groups():
    prompts = Axis.fresh(2)
    first = prompts.repeat(2)
    asked = first.ask(torch.tensor([0, 1, 3]))
    verdicts, replies = asked.repeat(2), asked.encode(torch.tensor([0, 2]))
    axis, order = Axis.join_groups([verdicts, replies])
    assert axis.parent is asked
    assert axis.slots.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
    assert order.tolist() == [0, 1, 6, 2, 3, 4, 5, 7]
    axis, _ = Axis.join_groups([first, verdicts])
    assert axis.parent is prompts
    assert axis.slots.tolist() == [0] * 6 + [1] * 4


def test_joined_groups_can_be_joined_again():
    prompts = Axis.fresh(2)
    pair, _ = Axis.join_groups([prompts.repeat(1), prompts.encode(torch.tensor([1]))])
    axis, _ = Axis.join_groups([pair, prompts.repeat(2)])
    assert axis.slots.tolist() == [0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("other", [Axis.fresh(2), Axis.fresh(2).repeat(1)])
def test_rows_of_other_prompts_are_not_joined_into_groups(other):
    """Equal keys don't make prompts the same."""
    assert Axis.join_groups([Axis.fresh(2).repeat(2), other]) is None
