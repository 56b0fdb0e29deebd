"""What a transfer of weights between two layouts on one pool will move, from the shapes in the model's folder: nothing is loaded."""

from __future__ import annotations

from rlflow.explain.memory import Kept
from rlflow.reshard.choices import advice
from rlflow.reshard.kinds import Cut, replicated, sharded, tensor_parallel
from rlflow.reshard.plan import Plan
from rlflow.reshard.planner import make_plan


def transfer(kept: Kept, ranks: int) -> Plan | None:
    """Of a model whose trainer and generator lie on the same ranks; None where each rank has all that it needs, or where shapes are not
    known. As dense decoders are usually cut: what an engine really does is traced when it is there."""
    if kept.facts is None or not kept.facts.shapes or ("weights" not in kept.divided and kept.sampler_shares == 1):
        return None
    shapes, size = kept.facts.shapes, kept.sampler_shares
    cuts = [Cut(range(ranks), ranks)] if "weights" in kept.divided else []
    target = tensor_parallel(shapes, kept.dtype, size, ranks) if size > 1 else replicated(shapes, kept.dtype, ranks)
    return make_plan(sharded(shapes, kept.dtype, cuts, ranks), target)


def savings(kept: Kept, ranks: int) -> tuple[str, ...]:
    """Layouts that would move fewer bytes, in words."""
    if kept.facts is None or "weights" not in kept.divided:
        return ()
    return tuple(advice(kept.facts.shapes, kept.dtype, ranks, kept.sampler_shares))
