"""Ranks exchange plain values only. A value that is too long or of another type ends the call."""

import pickle

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from rlflow.training.weight_sync import exchange as exchanges
from rlflow.training.weight_sync.exchange import TEXT, exchange
from rlflow.training.weight_sync.layout import HELD, WIDTHS, TensorShard
from rlflow.training.weight_sync.transport import TransferError

boxes = st.lists(
    st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 40)), max_size=3).map(tuple), max_size=3
).map(tuple)
shapes = st.lists(st.integers(0, 1 << 40)).map(tuple)
layouts = st.dictionaries(st.text(), st.builds(TensorShard, shapes, st.sampled_from(sorted(WIDTHS)), boxes))


@given(layouts)
def test_a_layout_arrives_unchanged(held):
    assert exchanges._decoded(0, HELD.dump_json(held), HELD) == held


@pytest.mark.parametrize(
    "raw",
    [
        pickle.dumps({}),
        b"",
        b"[]",
        b'{"w": 3}',
        b'{"w": {"shape": ["1"], "dtype": "int8", "boxes": []}}',
        b'{"w": {"shape": [1], "dtype": "int8", "boxes": [[[0]]]}}',
    ],
)
def test_a_value_of_another_type_is_refused_with_its_rank(raw):
    with pytest.raises(TransferError, match="rank 3 sent an invalid value"):
        exchanges._decoded(3, raw, HELD)


def test_all_ranks_get_all_values_in_rank_order(on_ranks):
    numbers = TypeAdapter(list[int])
    found = on_ranks(
        3, lambda rank: [exchange("x" * (rank * 1000), TEXT), exchange(list(range(rank)), numbers)]
    )
    assert found == [[["", "x" * 1000, "x" * 2000], [[], [0], [0, 1]]]] * 3


def test_an_impossible_length_is_refused_before_allocation(on_ranks):
    def act(rank):
        if rank == 0:  # a foreign process instead of the rank
            dist.all_gather(list(torch.zeros(2, dtype=torch.int64).split(1)), torch.tensor([1 << 50]))
            return ""
        with pytest.raises(TransferError) as refused:
            exchange("mine", TEXT)
        return str(refused.value)

    assert on_ranks(2, act)[1].startswith(f"rank 0 sent {1 << 50} bytes")
