"""The cuts of rows into steps and of steps into forwards."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.training.minibatches import microbatches, minibatches, units_of


def numbers(parts):
    return [torch.cat(part).tolist() for part in parts]


def test_a_minibatch_counts_rows_and_the_last_may_be_short():
    units = units_of(torch.arange(7))
    cut = numbers(minibatches(units, rows=3, seed=1, epoch=0))
    assert [len(part) for part in cut] == [3, 3, 1]
    assert sorted(sum(cut, [])) == list(range(7))
    assert cut == numbers(minibatches(units, rows=3, seed=1, epoch=0))
    assert cut != numbers(minibatches(units, rows=3, seed=1, epoch=1))
    assert cut != numbers(minibatches(units, rows=3, seed=2, epoch=0))


def test_a_minibatch_without_a_size_takes_all_rows():
    assert [
        len(part) for part in numbers(minibatches(units_of(torch.arange(9)), rows=None, seed=0, epoch=0))
    ] == [9]
    assert numbers(minibatches([], rows=4, seed=0, epoch=0)) == []


def test_groups_stay_complete():
    units = units_of(torch.tensor([0, 0, 0, 1, 2, 2, 3, 3]))
    assert [unit.tolist() for unit in units] == [[0, 1, 2], [3], [4, 5], [6, 7]]
    for part in minibatches(units, rows=4, seed=5, epoch=2):
        assert sum(map(len, part)) <= 4
    large = list(minibatches(units, rows=1, seed=0, epoch=0))
    assert [len(part) for part in large] == [1] * 4  # a group larger than a minibatch has its own


@given(sizes=st.lists(st.integers(1, 4), max_size=12), tokens=st.integers(1, 200), seed=st.integers(0, 99))
def test_micro_batches_contain_every_row_once_within_the_budget(sizes, tokens, seed):
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    lengths = torch.randint(1, 50, (len(groups),), generator=torch.Generator().manual_seed(seed))
    units = units_of(groups)
    cut = list(microbatches(units, lengths, tokens=tokens))
    rows = numbers(cut)
    assert sorted(sum(rows, [])) == list(range(len(groups)))
    longest = [int(lengths[part].max()) for part in rows]
    assert longest == sorted(longest, reverse=True)
    for part, row, width in zip(cut, rows, longest, strict=True):
        assert len(row) * width <= tokens or len(part) == 1
