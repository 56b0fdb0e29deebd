"""Rows between processes: they arrive unchanged in shared memory or in bytes, and integers take half their
bytes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow.author.batch import Batch
from rlflow.cluster.rpc.row_messages import RowMailbox
from rlflow.cluster.rpc.shared_memory import SMALL, SharedFrame
from rlflow.execution.wire import row_bytes
from rlflow.execution.wire.column_wire import WireError, unpack
from rlflow.execution.wire.row_bytes import opened, packed

FAR = 1 << 40  # needs more than 32 bits


def batch_of(lengths, largest=9):
    return Batch.of(
        tokens=[[row + place for place in range(length)] for row, length in enumerate(lengths)],
        rewards=[[row / 2] * length for row, length in enumerate(lengths)],
        scores=[float(row) for row in range(len(lengths))],
        prompt_id=[largest] * len(lengths),
        completion=[f"row {row}" for row in range(len(lengths))],
    )


def same(one, other):
    return all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype
        if isinstance(one[name], torch.Tensor)
        else one[name] == other[name]
        for name in other.columns
    )


@given(
    st.lists(st.sampled_from([0, 1, 3, 700]), min_size=1, max_size=7),
    st.data(),
    st.sampled_from([9, FAR, -FAR]),
)
def test_rows_in_any_order_arrive_unchanged_with_their_dtypes(lengths, data, largest):
    batch = batch_of(lengths, largest)
    rows = data.draw(
        st.none() | st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=9).map(torch.tensor)
    )
    expected = batch if rows is None else batch.rows(rows)
    found = opened(packed(batch, rows))
    assert same(found, expected)
    assert torch.equal(found.axis.keys, expected.axis.keys)


def test_an_empty_batch_arrives_empty():
    found = opened(packed(batch_of([]), torch.zeros(0, dtype=torch.int64)))
    assert len(found) == 0
    assert same(found, batch_of([]))


def test_integers_take_half_their_bytes_if_all_fit():
    few, many = batch_of([2000, 2000]), batch_of([2000, 2000], FAR)
    ids = few.select("tokens").data["tokens"].value.nbytes
    assert len(packed(few.select("tokens"))) < ids * 5 // 8
    assert len(packed(many.select("prompt_id"))) - len(packed(few.select("prompt_id"))) in range(128)
    assert opened(packed(many)).data["prompt_id"].value.tolist() == [FAR, FAR]


@pytest.mark.parametrize(
    ("largest", "fits"), [((1 << 31) - 1, True), (1 << 31, False), (-(1 << 31) - 1, False)]
)
def test_token_ids_travel_as_int32_and_others_are_refused(largest, fits):
    batch = Batch.of(tokens=[[1, largest]], prompt_tokens=[[largest]], seeds=[[largest]])
    if fits:
        assert {data.value.dtype for data in unpack(packed(batch).data).data.values()} == {torch.int32}
        return
    for name in ("tokens", "prompt_tokens"):
        with pytest.raises(
            WireError,
            match=f"column '{name}': found token id {largest}, expected ids of 32 bits, at most 2147483647",
        ):
            packed(batch.select(name))
    # these are not ids, so any value is valid
    assert opened(packed(batch.select("seeds")))["seeds"].tolist() == [[largest]]


def test_only_large_messages_go_through_shared_memory():
    mailbox, receiver, large = RowMailbox(), RowMailbox(), batch_of([9000, 9000])
    shared, alone = mailbox.message(large, shared=True), mailbox.message(large, shared=False)
    assert isinstance(shared, SharedFrame)
    assert not isinstance(alone, SharedFrame)
    assert shared.size == len(alone) > SMALL
    batches = receiver.opened([shared, alone])
    assert all(same(opened_again(batch), large) for batch in batches)
    assert mailbox.outbox._segments[0].in_use
    del batches
    assert not mailbox.outbox._segments[0].in_use  # its memory can be used again
    assert not isinstance(mailbox.message(batch_of([3]), shared=True), SharedFrame)


def opened_again(batch):
    """The batch with its dtypes."""
    return Batch(batch.axis, {name: row_bytes.widened(data) for name, data in batch.data.items()})


def test_a_process_reports_if_it_reaches_the_memory_of_another():
    mailbox = RowMailbox()
    at = mailbox.message(batch_of([9000, 9000]), shared=True)
    assert RowMailbox().reaches(at)
    assert not RowMailbox().reaches(at._replace(mark=at.mark + 1))
