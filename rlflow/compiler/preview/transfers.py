"""Predict how weights are transferred between two layouts, from the shapes in the model's folder.

No weights are loaded. The prediction assumes that dense decoders are sharded in the usual way, while a run
uses its engines' real layouts.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.compiler.byte_sizes import ModelFootprint
from rlflow.training.weight_sync.kinds import Cut, flat, replicated, row_parallel, sharded, tensor_parallel
from rlflow.training.weight_sync.layout import WeightLayout
from rlflow.training.weight_sync.planner import make_plan
from rlflow.training.weight_sync.transfer_plan import TransferPlan


def transfer(footprint: ModelFootprint, ranks: int) -> TransferPlan | None:
    """Plan the transfer of a model whose trainer and generator are on the same ranks.

    Returns None if each rank already has the weights it needs, or if no plan is possible.
    """
    if not _movable(footprint) or ("weights" not in footprint.divided and footprint.sampler_shares == 1):
        return None
    return make_plan(_trained(footprint, ranks), _sampled(footprint, ranks))


def passage(footprint: ModelFootprint, senders: int, receivers: int) -> TransferPlan | None:
    """Plan the transfer of a model from ``senders`` ranks to ``receivers`` ranks of another pool.

    Returns None if no plan is possible.
    """
    if not _movable(footprint):
        return None
    return make_plan(
        _trained(footprint, senders).among(0, receivers), _sampled(footprint, receivers).among(senders, 0)
    )


def following(
    other: ModelFootprint, footprint: ModelFootprint, senders: int, receivers: int
) -> TransferPlan | None:
    """Plan the transfer of a trainer's weights to a trainer that follows it, on another pool.

    Returns None if no plan is possible. Both keep their weights in float32 if they compute in a shorter dtype.
    """
    if not _movable(other):
        return None
    wide = "float64" if other.dtype == "float64" else "float32"
    source, target = (replace(each, dtype=wide) for each in (other, footprint))
    return make_plan(
        _trained(source, senders).among(0, receivers), _trained(target, receivers).among(senders, 0)
    )


def _movable(footprint: ModelFootprint) -> bool:
    """Return True if a transfer can be planned, that is, if shapes are known and there are no adapters.

    Adapters are merged into full tensors before a transfer.
    """
    return footprint.facts is not None and bool(footprint.facts.shapes) and not footprint.lora


def _trained(footprint: ModelFootprint, ranks: int) -> WeightLayout:
    assert footprint.facts is not None
    shapes, inner = footprint.facts.shapes, footprint.tensor
    if "weights" not in footprint.divided:
        return replicated(shapes, footprint.dtype, ranks)
    if footprint.flat:
        return flat(shapes, footprint.dtype, ranks)
    cuts = [Cut([rank % inner for rank in range(ranks)], inner, row_parallel)] if inner > 1 else []
    outer = Cut([rank // inner for rank in range(ranks)], ranks // inner)
    return sharded(shapes, footprint.dtype, [*cuts, outer])


def _sampled(footprint: ModelFootprint, ranks: int) -> WeightLayout:
    assert footprint.facts is not None
    shapes, size = footprint.facts.shapes, footprint.sampler_shares
    if size <= 1:
        return replicated(shapes, footprint.dtype, ranks)
    return tensor_parallel(shapes, footprint.dtype, size, ranks)
