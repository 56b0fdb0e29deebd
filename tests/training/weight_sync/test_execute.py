"""Transfers between two ranks: bits, alternating buckets, versions, digests, moved memory and errors."""

import pytest
import torch
from strategies import Case, World, bits_of, part

from rlflow.errors import PlanError
from rlflow.training.weight_sync.boxes import lengths
from rlflow.training.weight_sync.execute import Resharder
from rlflow.training.weight_sync.kinds import Cut, replicated, sharded, tensor_parallel
from rlflow.training.weight_sync.planner import make_plan
from rlflow.training.weight_sync.shards import ShardView, TensorViews
from rlflow.training.weight_sync.transport import AllToAll, Parcels, TransferError

SHAPES = {"a.weight": (6, 4), "b.weight": (5,), "c.weight": (8, 8)}
SOURCE = sharded(SHAPES, "float32", [Cut(range(2), 2)])
TARGETS = {
    "tensor parallel": tensor_parallel(SHAPES, "bfloat16", 2, 2),
    "replicas": replicated(SHAPES, "float32", 2),
    "as it is": SOURCE,
}


def values(version):
    return {
        name: bits_of(shape, "float32", 10 * version + i) for i, (name, shape) in enumerate(SHAPES.items())
    }


def pieces(layout, rank, version=None):
    """Return a rank's part of a layout: the values of a version, or memory to receive them."""
    found = {}
    for name, spread in layout.tensors.items():
        dtype = getattr(torch, spread.dtype)
        views = [
            torch.full(lengths(box), -77.0, dtype=dtype)
            if version is None
            else part(values(version)[name], box).clone().to(dtype)
            for box in spread.boxes[rank]
        ]
        found[name] = TensorViews(
            spread.shape, spread.dtype, tuple(map(ShardView, spread.boxes[rank], views))
        )
    return found


def fill(mine, version):
    for name, packed in mine.items():
        for piece in packed.pieces:
            piece.view.copy_(part(values(version)[name], piece.box))


def right(mine, version):
    return all(
        torch.equal(piece.view, part(values(version)[name], piece.box).to(piece.view.dtype))
        for name, packed in mine.items()
        for piece in packed.pieces
    )


def error_text(call):
    """Return the message of a call's exception, or an empty text."""
    try:
        call()
    except TransferError as error:
        return str(error)
    return ""


def resharder(rank, target="tensor parallel", bucket=32, **options):
    plan = make_plan(SOURCE, TARGETS[target], (0, 0), bucket)
    return Resharder(
        plan, rank, pieces(SOURCE, rank, 0), pieces(TARGETS[target], rank), AllToAll(), **options
    )


def transfers(rank):
    """Return for each transport whether every destination has the bits of each version."""
    found = {}
    for target in TARGETS:
        for buffers in (1, 2):
            for bucket in (16, 1 << 20):
                one = resharder(rank, target, bucket, buffers=buffers, verify_every=1)
                results = []
                for version in (1, 2, 3):
                    fill(one.source, version)
                    one.run(version)
                    results.append(
                        right(one.target, version) and (one.version, one.runs) == (version, version)
                    )
                found[f"{target}, {buffers}, {bucket}"] = [
                    all(results),
                    len(one.rounds),
                    one.transport.received,
                ]
                one.close()
    return found


def test_every_transfer_moves_exact_bits_in_buckets_of_any_size(on_ranks):
    found = on_ranks(2, transfers)
    assert len(found[0]) == 12
    for case in found[0]:
        assert [each[case][0] for each in found] == [True, True], case
    many, one, none = (
        found[0][f"{case}"] for case in ("replicas, 2, 16", "replicas, 2, 1048576", "as it is, 1, 16")
    )
    assert many[1] > one[1] == 1
    # three times the other rank's bytes, in float32
    assert many[2] == one[2] == 3 * 4 * sum(map(side_of, SHAPES.values()))
    assert none[1:] == [0, 0]  # everything is local


def side_of(shape):
    """Return the elements of the second of two shares of rows."""
    rows, rest = shape[0], shape[1] if len(shape) > 1 else 1
    return (rows - -(-rows // 2)) * rest


def faults(rank):
    """Report detected mismatches of versions and bytes, and when they are detected."""
    one = resharder(rank, verify_every=2)
    found = {"other version": error_text(lambda: one.run(5 + rank)), "version": one.version}
    one = resharder(rank, verify_every=2)
    found["first"] = error_text(lambda: one.run(1))
    one._local.into.clear()  # as if the rank skipped its own part
    one._local.out_of.clear()
    for packed in one.target.values():
        for piece in packed.pieces:
            piece.view.fill_(3.0)
    found["second"] = error_text(lambda: one.run(2))
    silent = resharder(rank, verify_every=0)
    silent.run(1)
    silent._local.into.clear()
    silent._local.out_of.clear()
    for packed in silent.target.values():
        for piece in packed.pieces:
            piece.view.fill_(3.0)
    found["never"] = error_text(lambda: silent.run(2))
    moved = resharder(rank)
    moved.run(1)
    moved.run(2)  # both buffers of a bound transfer are bound
    moved.relocate(pieces(SOURCE, rank, 4))
    moved.run(4)
    found["relocated"] = right(moved.target, 4)
    return found


def test_unequal_versions_and_digests_are_detected_at_the_comparison(on_ranks):
    for rank, found in enumerate(on_ranks(2, faults)):
        assert (
            found["other version"]
            == f"rank {rank} takes version {5 + rank}, but these ranks send other versions: {{{1 - rank}: {6 - rank}}}"
        )
        assert found["version"] == -1
        assert found["first"] == ""
        assert f"rank {rank}" in found["second"]
        assert "a.weight" in found["second"]
        assert found["never"] == ""
        assert found["relocated"]


# -- without a transport
# -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def world():
    return World.of(Case(SOURCE, TARGETS["replicas"], (0, 0), 32))


def test_a_bucket_is_repacked_each_time_into_free_memory(world):
    ranks = world.move()
    packed = ranks[1].pack(0)[0].clone()
    for name in world.sources[1]:
        for piece in world.sources[1][name].pieces:
            piece.view.mul_(2)
    assert not torch.equal(ranks[1].pack(0)[0], packed)


def test_bound_memory_must_match_the_plan(world):
    plan = world.case.plan()
    wrong = pieces(TARGETS["tensor parallel"], 0)
    for source, target, side in (
        (world.sources[0], wrong, "needs"),
        (world.sources[1], world.targets[0], "holds"),
    ):
        with pytest.raises(
            PlanError, match=f"the part of 'a.weight' that rank 0 {side} differs from the plan"
        ):
            Resharder(plan, 0, source, target, Parcels())
    missing = {name: packed for name, packed in world.targets[0].items() if name != "b.weight"}
    with pytest.raises(PlanError, match="'b.weight' that rank 0 needs"):
        Resharder(plan, 0, world.sources[0], missing, Parcels())
    bound = Resharder(plan, 0, world.sources[0], world.targets[0], Parcels())
    with pytest.raises(PlanError, match="'a.weight' that rank 0 holds"):
        bound.relocate(world.sources[1])


def test_a_finished_transfer_counts_and_has_its_version(world):
    ranks = world.move()
    assert [(rank.version, rank.runs) for rank in ranks] == [(1, 1), (1, 1)]
    with pytest.raises(TransferError):
        ranks[0].finish(2, 1)
    assert (ranks[0].version, ranks[0].runs) == (1, 1)
