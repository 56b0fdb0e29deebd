"""How weights move between the ranks of one pool, and the next choice if one way does not open."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from strategies import part

from rlflow.cluster.weights.same_ranks import SameRankTransfer, first_that_opens, movable, ways
from rlflow.errors import PlanError
from rlflow.execution.role_model import Model
from rlflow.training.weight_sync.boxes import lengths
from rlflow.training.weight_sync.kinds import Cut, replicated, sharded
from rlflow.training.weight_sync.proof import Destinations
from rlflow.training.weight_sync.shards import ShardView, TensorViews


@pytest.mark.parametrize(
    ("how", "device", "one_machine", "found"),
    [
        ("auto", "cpu", True, ("segment",)),
        # if processes cannot share GPU memory, messages still work
        ("auto", "cuda", True, ("handles", "alltoall")),
        ("auto", "cpu", False, ("alltoall",)),
        ("auto", "cuda", False, ("alltoall",)),
        ("alltoall", "cpu", True, ("alltoall",)),
        ("alltoall", "cuda", True, ("alltoall",)),
        ("segment", "cpu", True, ("segment",)),
        ("segment", "cuda", True, ("handles",)),  # the requested way, or none
    ],
)
def test_the_way_is_shared_memory_on_one_machine_and_messages_between_several(
    how, device, one_machine, found
):
    assert ways(how, device, one_machine) == found


def opening(refusals):
    """Return a function that opens ways and is refused with the code of each, and the list of tried ways."""
    tried = []

    def bound(way):
        tried.append(way)
        if way in refusals:
            raise PlanError.of(refusals[way], "refused")
        return way

    return bound, tried


def test_unshareable_gpu_memory_leads_to_the_next_way():
    bound, tried = opening({})
    assert first_that_opens(bound, ("handles", "alltoall")) == "handles"
    bound, tried = opening({"handles": "reshard-handles"})
    assert first_that_opens(bound, ("handles", "alltoall")) == "alltoall"
    assert tried == ["handles", "alltoall"]
    bound, tried = opening({"handles": "another"})
    with pytest.raises(PlanError, match="refused"):
        first_that_opens(bound, ("handles", "alltoall"))
    assert tried == ["handles"]


def test_the_last_way_raises_its_error():
    bound, tried = opening({"handles": "reshard-handles", "alltoall": "reshard-handles"})
    with pytest.raises(PlanError, match="refused"):
        first_that_opens(bound, ("handles", "alltoall"))
    assert tried == ["handles", "alltoall"]


class Shown:
    """A side that shows the memory of its weights, or has none to show."""

    def __init__(self, pieces=("some",)):
        self.shown = pieces

    def pieces(self):
        return self.shown

    def destinations(self, tensors):
        return None

    def writing(self, version):
        return nullcontext()

    def load(self, tensors):
        """Accept nothing."""


def test_without_other_ranks_no_plan_moves_anything():
    assert not movable(Model(Shown(), Shown()), "auto")


def test_a_plan_moves_weights_of_sides_that_show_them(on_ranks):
    def movable_pairs(rank):
        pairs = [
            Model(Shown(), Shown()),
            Model(Shown(None), Shown()),
            Model(SimpleNamespace(), Shown()),
            Model(Shown(), SimpleNamespace()),
        ]
        return [movable(pair, "auto") for pair in pairs] + [movable(pairs[0], "gather")]

    assert on_ranks(2, movable_pairs) == [[True, False, False, False, False]] * 2


SHAPES = {"a.weight": (6, 4), "b.weight": (5,)}


def values(version):
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()}


class Side(Shown):
    """A trainer that has the first or the second half of each tensor, or a generator that has all of it."""

    def __init__(self, layout, rank):
        self.layout, self.rank, self.steps = layout, rank, []
        self.renew()

    def renew(self):
        """Move the same boxes to other memory."""
        self.shown = {
            name: TensorViews(
                spread.shape,
                spread.dtype,
                tuple(ShardView(box, torch.zeros(lengths(box))) for box in spread.boxes[self.rank]),
            )
            for name, spread in self.layout.tensors.items()
        }

    def fill(self, version):
        for name, piece in self.all():
            piece.view.copy_(part(values(version)[name], piece.box))

    def all(self):
        return [(name, piece) for name, mine in self.shown.items() for piece in mine.pieces]

    def destinations(self, tensors):
        return Destinations(self.shown, {}, {})

    @contextmanager
    def writing(self, version):
        self.steps.append(version)
        yield

    def load(self, tensors):
        self.steps.append("load")


def moved(rank):
    """Check after each transfer that the sampler's weights are the trained ones; return the reports of the
    transfers."""
    trainer, generator = (
        Side(sharded(SHAPES, "float32", [Cut(range(2), 2)]), rank),
        Side(replicated(SHAPES, "float32", 2), rank),
    )
    moving, told, right = SameRankTransfer(Model(trainer, generator), "alltoall", "run", "cpu", 1), [], []
    for version in (1, 2, 3):
        if version == 3:
            trainer.renew()  # like an optimizer that moves its parameters to other memory
        trainer.fill(version)
        told.append(moving(version))
        right += [
            torch.equal(piece.view, part(values(version)[name], piece.box)) for name, piece in generator.all()
        ]
    moving.close()
    return [all(right), generator.steps, told]


def test_every_rank_samples_with_the_trained_weights(
    on_ranks,
):
    whole = 4 * sum(tensor.numel() for tensor in values(0).values())
    answers = on_ranks(2, moved)
    for right, steps, told in answers:
        assert right
        assert steps == [1, 2, 3]
        assert told[0]["transport"] == "alltoall"
        assert told[0]["inbound"] == told[0]["bound"]
        assert told[0] == told[1] == told[2]
    assert sum(told[0]["inbound"] for _, _, told in answers) == whole  # each gets the part of the other one
