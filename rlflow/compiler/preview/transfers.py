"""What a transfer of weights from one layout to another will move, from the shapes in the model's folder: nothing is loaded.

As dense decoders are usually cut: what an engine really does is traced when it is there.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.compiler.sizes import ModelFootprint
from rlflow.training.weight_sync.choices import Choices, orders, shard_dims
from rlflow.training.weight_sync.kinds import Cut, flat, replicated, row_parallel, sharded, tensor_parallel
from rlflow.training.weight_sync.layout import WeightLayout
from rlflow.training.weight_sync.plan import TransferPlan
from rlflow.training.weight_sync.planner import make_plan


def transfer(footprint: ModelFootprint, ranks: int) -> TransferPlan | None:
    """The transfer of a model whose trainer and generator lie on the same ranks; None where each rank has all that it needs, or no plan
    moves it."""
    if not _movable(footprint) or ("weights" not in footprint.divided and footprint.sampler_shares == 1):
        return None
    return make_plan(_trained(footprint, ranks), _sampled(footprint, ranks))


def passage(footprint: ModelFootprint, senders: int, receivers: int) -> TransferPlan | None:
    """The transfer of a model whose halves lie on two pools of so many ranks; None where no plan moves it."""
    if not _movable(footprint):
        return None
    return make_plan(_trained(footprint, senders).among(0, receivers), _sampled(footprint, receivers).among(senders, 0))


def _movable(footprint: ModelFootprint) -> bool:
    """Shapes are known, and there are no adapters, which are merged into whole tensors first."""
    return footprint.facts is not None and bool(footprint.facts.shapes) and not footprint.lora


def _trained(footprint: ModelFootprint, ranks: int) -> WeightLayout:
    assert footprint.facts is not None
    shapes, inner, dims = footprint.facts.shapes, footprint.tensor, dict(footprint.dims)
    if "weights" not in footprint.divided:
        return replicated(shapes, footprint.dtype, ranks)
    if footprint.flat:
        return flat(shapes, footprint.dtype, ranks)
    cuts = [Cut([rank % inner for rank in range(ranks)], inner, row_parallel)] if inner > 1 else []
    outer = Cut([rank // inner for rank in range(ranks)], ranks // inner, lambda name, shape: dims.get(name, 0))
    return sharded(shapes, footprint.dtype, [*cuts, outer])


def _sampled(footprint: ModelFootprint, ranks: int) -> WeightLayout:
    assert footprint.facts is not None
    shapes, size = footprint.facts.shapes, footprint.sampler_shares
    if size <= 1:
        return replicated(shapes, footprint.dtype, ranks)
    return tensor_parallel(shapes, footprint.dtype, size, ranks, outer=footprint.outer)


def ways(footprint: ModelFootprint, ranks: int) -> Choices | None:
    """The choices of trainer and sampler on the same ranks that could make fewer bytes move; None where nothing moves, or not by a plan.
    Weights that lie whole, or in parts of flattened tensors, or that tensor parallelism cuts first, leave the choice to the sampler."""
    if not _movable(footprint) or "weights" not in footprint.divided:
        return None
    assert footprint.facts is not None
    shapes, size = footprint.facts.shapes, footprint.sampler_shares
    dims = {} if footprint.flat or footprint.tensor > 1 or size == 1 else shard_dims(shapes, ranks)
    matched = {"matched": _trained(replace(footprint, dims=tuple(dims.items())), ranks)} if dims else {}
    targets = {order: _sampled(replace(footprint, outer=order == "outer"), ranks) for order in orders(ranks, size)}
    return Choices.of(shapes, size, dims, {"first": _trained(replace(footprint, dims=()), ranks), **matched}, targets)


def least(footprint: ModelFootprint, ranks: int, matches: bool, order: str) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Choose the way that moves the fewest bytes: the tensors that the trainer should shard along another dimension than the first, with
    that dimension, and whether the order of the sampler's ranks should be outer. matches: whether the trainer can; order: inner, outer,
    or auto for either."""
    layouts = ways(footprint, ranks)
    if layouts is None:
        return (), order == "outer"
    best = next(choice for choice in layouts.by_cost if order in ("auto", choice.order) and (matches or choice.dims == "first"))
    return tuple(layouts.matched.items()) if best.dims == "matched" else (), best.order == "outer"


def savings(footprint: ModelFootprint, ranks: int) -> tuple[str, ...]:
    """On the same ranks: what is done so that fewer bytes move, and what could be, in words."""
    layouts = ways(footprint, ranks)
    return tuple(layouts.told("matched" if footprint.dims else "first", "outer" if footprint.outer else "inner")) if layouts else ()
