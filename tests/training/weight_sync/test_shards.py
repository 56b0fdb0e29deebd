"""Pieces of live tensors, and their boxes."""

import pytest
import torch
import torch.distributed as dist

from rlflow.errors import PlanError
from rlflow.training.weight_sync.shards import from_flat, is_dtensor, pieces_of, ties_of


def sharded(rank):
    """On two ranks: return the box and the elements of this rank, of five unevenly divided rows; and a sum
    over ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(15.0).view(5, 3)
    tensor = distribute_tensor(whole, mesh, [Shard(0)])
    views = pieces_of([("weight", tensor)])["weight"]
    [piece] = views.pieces
    try:
        pieces_of([("sum", DTensor.from_local(whole, mesh, [Partial()]))])
        found_code = ""
    except PlanError as error:
        found_code = error.problems[0].code
    return [
        list(views.shape),
        [list(side) for side in piece.box],
        piece.view.tolist(),
        is_dtensor(tensor),
        is_dtensor(whole),
        ties_of([("one", tensor), ("other", tensor)]),
        found_code,
    ]


def test_each_rank_has_its_box_of_a_shard_and_none_of_a_partial_sum(on_ranks):
    rows = torch.arange(15.0).view(5, 3).tolist()
    ties = {"other": "one"}
    assert on_ranks(2, sharded) == [
        [[5, 3], [[0, 3], [0, 3]], rows[:3], True, False, ties, "reshard-partial"],
        [[5, 3], [[3, 5], [0, 3]], rows[3:], True, False, ties, "reshard-partial"],
    ]


def test_a_full_tensor_is_one_view_of_its_memory():
    tensor = torch.arange(6.0).view(2, 3)
    [piece] = pieces_of([("weight", tensor)])["weight"].pieces
    assert piece.box == ((0, 2), (0, 3))
    assert piece.view.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(
    ("rank", "boxes"),
    [
        (0, [((0, 1), (0, 3)), ((1, 2), (0, 2))]),
        (1, [((1, 2), (2, 3)), ((2, 3), (0, 3))]),
    ],
)
def test_a_part_of_a_flattened_tensor_is_a_few_boxes(rank, boxes):
    parts = torch.arange(10.0).split(5)  # nine elements and padding
    views = from_flat("weight", parts[rank], (3, 3), rank, 2)
    assert [piece.box for piece in views.pieces] == boxes
    assert (
        torch.cat([piece.view.flatten() for piece in views.pieces]).tolist()
        == list(range(9))[rank * 5 : rank * 5 + 5]
    )
