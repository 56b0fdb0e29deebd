"""Ranks that train one model add up their gradients, whatever the dtype and size, and also if a rank has
none.
"""

import pytest
import torch

from rlflow.training import peers
from rlflow.training.peers import Peers

COUNTS = [3, 5]  # micro-batches of each rank
SHAPES = [
    ((2, 3), torch.float32),
    ((4,), torch.float32),
    ((), torch.float32),
    ((5,), torch.float64),
    ((2,), torch.float32),
]


def parameters(rank):
    """Return gradients 1, 2, … on the first rank and ten times as much on the second. The second rank has
    none for the second parameter.
    """
    made = []
    for number, (shape, dtype) in enumerate(SHAPES, 1):
        parameter = torch.zeros(shape, dtype=dtype, requires_grad=True)
        parameter.grad = (
            torch.arange(1.0, parameter.numel() + 1).reshape(shape).to(dtype) * number * (10 if rank else 1)
        )
        made.append(parameter)
    if rank:
        made[1].grad = None
    return made


def on_a_rank(rank):
    """Run all exchanges of a rank and return their results."""
    together, apart = Peers(lockstep=True), Peers()
    numbers = torch.tensor([1.5, 2.0]) * (rank + 1)
    found = {"ranks": together.ranks, "total": together.total(numbers).tolist(), "own": numbers.tolist()}
    found["idle"] = [peer.idle(COUNTS[rank], torch.device("cpu")) for peer in (together, apart)]
    for name, bucket in (("one bucket", 64 << 20), ("of 16 bytes", 16), ("of one element", 1)):
        peers.BUCKET, made = bucket, parameters(rank)
        pointers = [None if parameter.grad is None else parameter.grad.data_ptr() for parameter in made]
        together.add_gradients(iter(made))
        found[name] = [parameter.grad.tolist() for parameter in made]
        found[f"{name}, dtypes"] = [str(parameter.grad.dtype) for parameter in made]
        assert all(parameter.grad.is_contiguous() for parameter in made)
        assert len({parameter.grad.untyped_storage().data_ptr() for parameter in made}) == len(made), pointers
    return found


def test_two_ranks_get_the_sum_of_both(on_ranks):
    found = on_ranks(2, on_a_rank)
    summed = [(own.grad * (1 if number == 1 else 11)).tolist() for number, own in enumerate(parameters(0))]
    for rank, said in enumerate(found):
        assert (said["ranks"], said["total"], said["own"]) == (
            2,
            [4.5, 6.0],
            [1.5 * (rank + 1), 2.0 * (rank + 1)],
        )
        assert said["idle"] == [max(COUNTS) - COUNTS[rank], 0]
        for name in ("one bucket", "of 16 bytes", "of one element"):
            assert said[name] == summed, name
            assert said[f"{name}, dtypes"] == [str(dtype) for _, dtype in SHAPES]


def test_a_single_rank_keeps_its_gradients_without_waiting():
    alone, made = Peers(lockstep=True), parameters(1)
    numbers, before = torch.tensor([1.0]), [parameter.grad for parameter in made]
    assert alone.ranks == 1
    assert alone.total(numbers) is numbers
    assert alone.idle(7, torch.device("cpu")) == 0
    alone.add_gradients(made)
    assert all(parameter.grad is gradient for parameter, gradient in zip(made, before, strict=True))


@pytest.mark.parametrize(
    ("bucket", "sizes"),
    [
        (1 << 20, [[0, 1, 2], [3], [4]]),
        (44, [[0, 1, 2], [3], [4]]),
        (40, [[0, 1], [2], [3], [4]]),
        (1, [[0], [1], [2], [3], [4]]),
    ],
)
def test_buckets_have_one_dtype_up_to_their_size_in_order(monkeypatch, bucket, sizes):
    monkeypatch.setattr(peers, "BUCKET", bucket)
    made = parameters(0)
    found = [
        [next(i for i, one in enumerate(made) if one is parameter) for parameter in each]
        for each in peers._buckets(made)
    ]
    assert found == sizes
    assert list(peers._buckets([])) == []
