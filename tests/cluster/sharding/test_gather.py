"""Rows gathered from several parts equal those of a plain concatenation, in memory of their own."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow import Batch
from rlflow.author.copy_on_write import address, file_memory
from rlflow.cluster.rpc.row_messages import RowMailbox
from rlflow.cluster.sharding.gather import gathered, owned
from rlflow.execution.wire.row_bytes import opened, packed

NAMES = ["tokens", "rewards", "scores", "completion"]


def part(lengths, first=0):
    return Batch.of(
        tokens=[[first + row + place for place in range(length)] for row, length in enumerate(lengths)],
        rewards=[[first + row / 2] * length for row, length in enumerate(lengths)],
        scores=[float(first + row) for row in range(len(lengths))],
        completion=[f"row {first + row}" for row in range(len(lengths))],
    )


def assert_same(found, expected):
    assert list(found.data) == NAMES
    for name in NAMES:
        one, other = found[name], expected[name]
        assert (
            torch.equal(one, other) and one.dtype == other.dtype
            if isinstance(one, torch.Tensor)
            else one == other
        ), name
    assert torch.equal(found.axis.keys, expected.axis.keys)


LENGTHS = st.lists(st.sampled_from([1, 2, 600]), min_size=1, max_size=5)


@settings(max_examples=60)
@given(st.lists(LENGTHS, min_size=1, max_size=3), st.data())
def test_gathered_rows_equal_those_of_a_concatenation(lengths, data):
    batches = [part(each, 100 * number) for number, each in enumerate(lengths)]
    some = [
        data.draw(
            st.none() | st.lists(st.integers(0, len(batch) - 1), min_size=1, max_size=6).map(torch.tensor)
        )
        for batch in batches
    ]
    picked = [batch if rows is None else batch.rows(rows) for batch, rows in zip(batches, some, strict=True)]
    whole = Batch.concat(picked)
    order = data.draw(st.none() | st.permutations(range(len(whole))).map(torch.tensor))
    expected = whole if order is None else whole.rows(order)
    assert_same(gathered(list(zip(batches, some, strict=True)), NAMES, order), expected)


def test_rows_of_one_shared_frame_are_not_copied():
    sender, receiver, first, other = RowMailbox(), RowMailbox(), part([5000, 4000]), part([3000, 2000], 7)
    one, two = receiver.opened([sender.message(batch, shared=True) for batch in (first, other)])
    stays, joined = gathered([(one, None)], NAMES), gathered([(one, None), (two, None)], NAMES)
    del one, two
    assert [segment.in_use for segment in sender.outbox._segments] == [True, False]
    # not copied
    assert address(stays.data["rewards"].value) - file_memory(stays.data["rewards"].value).address > 0
    assert all(file_memory(joined.data[name].value) is None for name in NAMES[:3])
    sender.message(part([5000, 4000], 55), shared=True)  # into other memory, because the first is in use
    assert_same(stays, first)
    assert_same(joined, Batch.concat([first, other]))
    del stays
    assert not sender.outbox._segments[0].in_use


def test_rows_from_ray_are_copied():
    batch = opened(packed(part([5000, 4000])))
    own = owned(batch)
    assert address(own.data["rewards"].value) != address(batch.data["rewards"].value)
    assert_same(own, part([5000, 4000]))
