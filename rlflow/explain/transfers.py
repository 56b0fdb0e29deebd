"""What a transfer of weights from one layout to another will move, from the shapes in the model's folder: nothing is loaded.

As dense decoders are usually cut: what an engine really does is traced when it is there.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.memory.sizes import ModelFootprint
from rlflow.reshard.choices import Choices, orders, shard_dims
from rlflow.reshard.kinds import Cut, flat, replicated, row_parallel, sharded, tensor_parallel
from rlflow.reshard.layout import WeightLayout
from rlflow.reshard.plan import TransferPlan
from rlflow.reshard.planner import make_plan


def transfer(kept: ModelFootprint, ranks: int) -> TransferPlan | None:
    """Of a model whose trainer and generator lie on the same ranks; None where each rank has all that it needs, or no plan moves it."""
    if not _movable(kept) or ("weights" not in kept.divided and kept.sampler_shares == 1):
        return None
    return make_plan(_trained(kept, ranks), _sampled(kept, ranks))


def passage(kept: ModelFootprint, senders: int, receivers: int) -> TransferPlan | None:
    """Of one whose halves lie on two pools of so many ranks; None where no plan moves it."""
    if not _movable(kept):
        return None
    return make_plan(_trained(kept, senders).among(0, receivers), _sampled(kept, receivers).among(senders, 0))


def _movable(kept: ModelFootprint) -> bool:
    """Shapes are known, and there are no adapters, which are merged into whole tensors first."""
    return kept.facts is not None and bool(kept.facts.shapes) and not kept.lora


def _trained(kept: ModelFootprint, ranks: int) -> WeightLayout:
    assert kept.facts is not None
    shapes, inner, dims = kept.facts.shapes, kept.tensor, dict(kept.dims)
    if "weights" not in kept.divided:
        return replicated(shapes, kept.dtype, ranks)
    if kept.flat:
        return flat(shapes, kept.dtype, ranks)
    cuts = [Cut([rank % inner for rank in range(ranks)], inner, row_parallel)] if inner > 1 else []
    outer = Cut([rank // inner for rank in range(ranks)], ranks // inner, lambda name, shape: dims.get(name, 0))
    return sharded(shapes, kept.dtype, [*cuts, outer])


def _sampled(kept: ModelFootprint, ranks: int) -> WeightLayout:
    assert kept.facts is not None
    shapes, size = kept.facts.shapes, kept.sampler_shares
    return tensor_parallel(shapes, kept.dtype, size, ranks, outer=kept.outer) if size > 1 else replicated(shapes, kept.dtype, ranks)


def ways(kept: ModelFootprint, ranks: int) -> Choices | None:
    """What trainer and sampler on the same ranks can do so that fewer bytes move; None where nothing moves, or by no plan. Weights that lie
    whole or in parts of flattened tensors, or are cut by tensor parallelism first, leave the choice to the sampler."""
    if not _movable(kept) or "weights" not in kept.divided:
        return None
    assert kept.facts is not None
    shapes, size = kept.facts.shapes, kept.sampler_shares
    dims = {} if kept.flat or kept.tensor > 1 or size == 1 else shard_dims(shapes, ranks)
    matched = {"matched": _trained(replace(kept, dims=tuple(dims.items())), ranks)} if dims else {}
    targets = {order: _sampled(replace(kept, outer=order == "outer"), ranks) for order in orders(ranks, size)}
    return Choices.of(shapes, size, dims, {"first": _trained(replace(kept, dims=()), ranks), **matched}, targets)


def least(kept: ModelFootprint, ranks: int, matches: bool, order: str) -> tuple[tuple[tuple[str, int], ...], bool]:
    """Of these the least: the tensors that the trainer should shard along another dimension than the first, and which, and whether the
    order of the sampler's ranks should be outer. matches: whether the trainer can; order: inner, outer, or auto for either."""
    found = ways(kept, ranks)
    if found is None:
        return (), order == "outer"
    best = next(choice for choice in found.found if order in ("auto", choice.order) and (matches or choice.dims == "first"))
    return tuple(found.matched.items()) if best.dims == "matched" else (), best.order == "outer"


def savings(kept: ModelFootprint, ranks: int) -> tuple[str, ...]:
    """On the same ranks: what is done so that fewer bytes move, and what could be, in words."""
    found = ways(kept, ranks)
    return tuple(found.told("matched" if kept.dims else "first", "outer" if kept.outer else "inner")) if found else ()
