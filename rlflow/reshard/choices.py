"""Layouts that save bytes: which dimension the trainer shards, and which ranks make up a replica of the rollout, told in words.

A trainer that is sharded along the dimension along which the rollout cuts holds a part of what it needs itself. And with the ranks of one
cut side by side (outer) instead of those of one replica (inner), the parts that a rank lacks lie on ranks that need the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.reshard.boxes import lengths
from rlflow.reshard.kinds import Cut, Dim, Shapes, row_parallel, sharded, tensor_parallel
from rlflow.reshard.layout import Layout, Spread
from rlflow.reshard.plan import Plan, readable
from rlflow.reshard.planner import BUCKET, make_plan


@dataclass(frozen=True)
class Choice:
    """One way to lay out trainer and rollout, and what a transfer then moves: bytes that the rank with the most receives, and all of
    them."""

    dims: str  # "first": dimension 0 of every tensor; "matched": the one along which the rollout cuts
    order: str  # "inner": ranks of a replica are neighbours; "outer": those of a cut
    inbound: int
    total: int
    across: int  # of the total, from machine to machine


def choices(shapes: Shapes, dtype: str, ranks: int, size: int, nodes: Sequence[int] | None = None, dim: Dim = row_parallel,
            bucket: int = BUCKET) -> list[Choice]:  # fmt: skip
    """FSDP2 over ``ranks`` to rollouts of tensor parallel ``size`` on the same ranks, the fewest bytes first. dim: along which dimension
    the rollout cuts a tensor (``cut_dims`` of a traced layout, or the dense decoders' usual)."""
    matched = shard_dims(shapes, ranks, dim)
    sources = {"first": sharded(shapes, dtype, [Cut(range(ranks), ranks)]),
               "matched": sharded(shapes, dtype, [Cut(range(ranks), ranks, lambda name, shape: matched.get(name, 0))])}  # fmt: skip
    made = []
    for dims, source in sources.items():
        for order in ("inner", "outer") if 1 < size < ranks else ("inner",):
            target = tensor_parallel(shapes, dtype, size, ranks, outer=order == "outer", dim=dim)
            made.append(_choice(dims, order, make_plan(source, target, nodes, bucket)))
    return sorted(made, key=lambda choice: (choice.inbound, choice.total))  # stable: the plainer one first


def _choice(dims: str, order: str, plan: Plan) -> Choice:
    return Choice(dims, order, int(plan.stats.inbound.max(initial=0)), int(plan.stats.inbound.sum()), plan.stats.across)


def shard_dims(shapes: Shapes, ranks: int, dim: Dim = row_parallel) -> dict[str, int]:
    """The tensors that FSDP2 should shard along another dimension than 0, and which (``shard_placement_fn``). FSDP2 shards other
    dimensions than 0 only where the ranks divide them."""
    found = {name: dim(name, shape) for name, shape in shapes.items() if shape}
    return {name: cut for name, cut in found.items() if cut and shapes[name][cut] % ranks == 0}


def cut_dims(target: Layout) -> dict[str, int]:
    """Along which dimension a layout, as an engine's trace gives it, cuts each tensor; those that are whole are left out. A tensor cut
    along several counts with the first."""
    found = {name: _cut_dim(spread) for name, spread in target.tensors.items()}
    return {name: dim for name, dim in found.items() if dim is not None}


def _cut_dim(spread: Spread) -> int | None:
    sizes = [lengths(box) for boxes in spread.boxes for box in boxes]
    return next((dim for dim, whole in enumerate(spread.shape) if any(size[dim] < whole for size in sizes)), None)


def advice(shapes: Shapes, dtype: str, ranks: int, size: int, nodes: Sequence[int] | None = None, dim: Dim = row_parallel) -> list[str]:
    """The best choice in words, against the plain one (dimension 0, ranks of a replica side by side). Nothing where that is the best."""
    found = choices(shapes, dtype, ranks, size, nodes, dim)
    plain = next(choice for choice in found if (choice.dims, choice.order) == ("first", "inner"))
    best = found[0]
    if best.inbound == plain.inbound:
        return []
    lines = [f"a transfer can bring {readable(best.inbound)} to the rank that receives most, not {readable(plain.inbound)}:"]
    if best.dims == "matched":
        lines.append(_dims_line(shard_dims(shapes, ranks, dim), shapes))
    if best.order == "outer":
        lines.append(f"  put ranks that hold the same part of the model side by side: rank r has part r // {ranks // size} of {size}, "
                     f"not r % {size}, which engines here do not offer")  # fmt: skip
    return lines


def worthwhile(shapes: Shapes, dtype: str, ranks: int, size: int) -> dict[str, int]:
    """The dimensions of ``shard_dims``, where they save bytes with the ranks of a replica side by side; else nothing."""
    found = {choice.dims: choice.inbound for choice in choices(shapes, dtype, ranks, size) if choice.order == "inner"}
    return shard_dims(shapes, ranks) if found["matched"] < found["first"] else {}


def applied(shapes: Shapes, dtype: str, ranks: int, size: int, dims: Mapping[str, int]) -> list[str]:
    """What matched dimensions save, in words, and what else would."""
    found = {(choice.dims, choice.order): choice.inbound for choice in choices(shapes, dtype, ranks, size)}
    lines = [f"so that a transfer brings {readable(found['matched', 'inner'])} to the rank that receives most, not "
             f"{readable(found['first', 'inner'])}:", _dims_line(dims, shapes, "the trainer shards")]  # fmt: skip
    if found.get(("matched", "outer"), found["matched", "inner"]) < found["matched", "inner"]:
        lines.append(f"  {readable(found['matched', 'outer'])} if ranks with the same part of the model were side by side, which engines "
                     "here do not offer")  # fmt: skip
    return lines


def _dims_line(matched: Mapping[str, int], shapes: Shapes, verb: str = "shard") -> str:
    ends = sorted({".".join(name.split(".")[-2:]) for name in matched})
    return f"  {verb} {len(matched)} of {len(shapes)} tensors along the dimension that the rollout cuts, not the first: {', '.join(ends)}"
