"""Families of rows with a common prefix: the fewest tokens are computed, and each row stays complete in its
unit.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.author.batch import Batch
from rlflow.training.prefixes import LEAST, Family, families, packed_microbatches


def batch(prompts, lengths=None):
    return Batch.of(prompt_tokens=prompts, tokens=[[1] * n for n in lengths or [2] * len(prompts)])


def found(prompts):
    return families(batch(prompts).data["prompt_tokens"])


def computed(prompts, some):
    """Return the number of computed prompt tokens."""
    return sum(map(len, prompts)) - sum((len(family.rows) - 1) * family.shared for family in some)


def test_rows_of_one_prompt_share_all_except_its_last_token():
    a, b = [5, 6, 7, 8, 9, 4], [5, 3, 7, 8, 9, 4, 2, 2]
    assert found([a, b, a, a, b]) == [Family((0, 2, 3), 5), Family((1, 4), 7)]


def test_prompts_share_a_prefix_if_that_saves_tokens():
    start, longer = list(range(10, 30)), list(range(10, 30)) + [7] * 20
    assert found([[*start, 1, 1], [*start, 2], start]) == [Family((0, 1, 2), 19)]
    assert found([[*longer, 1], [*longer, 1], [*longer, 1], [*start, 9]]) == [
        Family((0, 1, 2), 40),
        Family((3,), 0),
    ]


def test_short_prefixes_and_single_rows_are_computed_by_row():
    short = [3] * LEAST
    assert found([short, short, [9, 8, 7, 6, 5, 4]]) == [Family((0, 1, 2), 0)]
    assert found([[*short, 1], [*short, 2]]) == [Family((0, 1), LEAST)]
    assert found([]) == []


def partitions(items):
    if not items:
        yield []
        return
    for size in range(1, len(items) + 1):
        for rest in partitions(items[size:]):
            yield [items[:size], *rest]


def fewest(prompts):
    """Try every cut of the sorted prompts."""

    def saved(run):
        common = len(
            list(
                itertools.takewhile(
                    lambda column: len(set(column)) == 1, zip(*(p[:-1] for p in run), strict=False)
                )
            )
        )
        common = min(common, *(len(p) - 1 for p in run))
        return (len(run) - 1) * (common if common >= LEAST else 0)

    return sum(map(len, prompts)) - max(sum(map(saved, cut)) for cut in partitions(sorted(prompts)))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), min_size=1, max_size=8))
def test_the_families_compute_the_fewest_tokens(prompts):
    some = found(prompts)
    assert sorted(row for family in some for row in family.rows) == list(range(len(prompts)))
    for family in some:
        assert len({tuple(prompts[row][: family.shared]) for row in family.rows}) == 1
        assert all(len(prompts[row]) > family.shared for row in family.rows)
    assert computed(prompts, some) == fewest(prompts)


def taken(cut):
    return [torch.cat(units).tolist() for units in cut]


def test_micro_batches_take_families_in_sequence():
    a, b = list(range(20)), list(range(30, 50))
    rows = batch([a, b, a, b, a, b])
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 4, 1, 0, 3]):
        units = [torch.tensor([i]) for i in order]
        # 19 common tokens, then 3 for each row
        assert taken(packed_microbatches(rows, units, tokens=28)) == [[0, 2, 4], [1, 3, 5]]
        assert taken(packed_microbatches(rows, units, tokens=27)) == [[0, 2], [4], [1, 3], [5]]
        assert taken(packed_microbatches(rows, units, tokens=1000)) == [[0, 2, 4, 1, 3, 5]]
    assert taken(packed_microbatches(rows, [], tokens=10)) == []


def test_units_stay_complete_and_an_oversized_one_is_alone():
    a, b = list(range(20)), list(range(30, 50))
    rows = batch([a, b, a, b])
    pairs = [torch.tensor([0, 1]), torch.tensor([2, 3])]
    assert taken(packed_microbatches(rows, pairs, tokens=1)) == [[0, 1], [2, 3]]
    assert taken(packed_microbatches(rows, pairs, tokens=2 * 19 + 4 * 3)) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("tokens", [10, 100])
def test_every_row_is_in_one_micro_batch(tokens):
    chance = torch.Generator().manual_seed(0)
    draw = lambda below, count: torch.randint(0, below, (count,), generator=chance).tolist()  # noqa: E731
    prompts = [[7] * 6 + draw(2, 1 + draw(8, 1)[0]) for _ in range(40)]
    rows = batch(prompts, draw(9, 40))
    cut = taken(packed_microbatches(rows, list(torch.arange(40).split(1)), tokens=tokens))
    assert sorted(itertools.chain(*cut)) == list(range(40))
