"""Layouts that save bytes: which dimension the trainer shards, and which ranks make up a replica of the rollout; and why, in words.

A trainer that is sharded along the dimension along which the rollout cuts holds a part of what it needs itself. And with the ranks of one
cut side by side (outer) instead of those of one replica (inner), the parts that a rank lacks lie on ranks that need the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlflow.training.weight_sync.boxes import lengths
from rlflow.training.weight_sync.kinds import Cut, Dim, Shapes, row_parallel, sharded, tensor_parallel
from rlflow.training.weight_sync.layout import Spread, WeightLayout
from rlflow.training.weight_sync.plan import TransferPlan, readable
from rlflow.training.weight_sync.planner import make_plan


@dataclass(frozen=True)
class Choice:
    """One way to lay out trainer and rollout, and what a transfer then moves: bytes that the rank with the most receives, and all of
    them."""

    dims: str  # "first": dimension 0 of every tensor; "matched": the one along which the rollout cuts
    order: str  # "inner": ranks of a replica are neighbours; "outer": those of a cut
    inbound: int
    total: int
    across: int  # of the total, from machine to machine


@dataclass(frozen=True)
class Choices:
    """All choices for a model on so many ranks, that with the fewest bytes first, of equal ones the plainer."""

    shapes: Shapes  # of the tensors
    ranks: int  # that train and sample
    size: int  # ranks that make up a replica of the rollout
    matched: Mapping[str, int]  # tensor → dimension that "matched" shards instead of the first (``shard_dims``)
    by_cost: tuple[Choice, ...]  # the cheapest first

    @staticmethod
    def of(shapes: Shapes, size: int, matched: Mapping[str, int], sources: Mapping[str, WeightLayout], targets: Mapping[str, WeightLayout],
           nodes: Sequence[int] | None = None) -> Choices:  # fmt: skip
        """Every pair of a trainer's layout (``sources``, by dims) and a rollout's layout (``targets``, by order), the cheapest first.
        Pairs of equal cost keep the order in which they are given."""
        pairs = itertools.product(sources.items(), targets.items())
        pairs_by_cost = [_choice(dims, order, make_plan(source, target, nodes)) for (dims, source), (order, target) in pairs]
        return Choices(shapes, next(iter(targets.values())).ranks, size, matched, tuple(sorted(pairs_by_cost, key=cost)))

    @property
    def best(self) -> Choice:
        """The choice that moves the fewest bytes."""
        return self.by_cost[0]

    def told(self, dims: str, order: str) -> list[str]:
        """Lines of text: how many bytes the choice (dims, order) saves against the plain one, and how many the best choice would save
        beyond it."""
        by_name = {(choice.dims, choice.order): choice for choice in self.by_cost}
        plain, done = by_name["first", "inner"], by_name[dims, order]
        lines = []
        if cost(done) < cost(plain):
            lines += [f"so that a transfer brings {_less(done, plain)}:", *self._ways(done, plain)]
        if cost(self.best) < cost(done):
            lines += [f"a transfer can bring {_less(self.best, done)}, where", *self._ways(self.best, done)]
        return lines

    def _ways(self, one: Choice, other: Choice) -> Iterator[str]:
        """The dimensions in which ``one`` differs from ``other``, a line of text each."""
        if one.dims != other.dims:
            yield self._dims(one.dims)
        if one.order != other.order:
            yield self._order(one.order)

    def _dims(self, dims: str) -> str:
        if dims == "first":
            return "  the trainer shards all tensors along the first dimension"
        ends = sorted({".".join(name.split(".")[-2:]) for name in self.matched})
        return (f"  the trainer shards {len(self.matched)} of {len(self.shapes)} tensors along the dimension that the rollout cuts, not "
                f"the first: {', '.join(ends)}")  # fmt: skip

    def _order(self, order: str) -> str:
        outer, inner = f"r // {self.ranks // self.size}", f"r % {self.size}"
        if order == "inner":
            return f"  rank r of the sampler has part {inner} of {self.size}, not {outer}: ranks of one replica are side by side"
        return (f"  on one machine rank r of the sampler has part {outer} of {self.size}, not {inner}: ranks with the same part are side "
                "by side")  # fmt: skip


def cost(choice: Choice) -> tuple[int, int]:
    """The key by which choices are compared: bytes that the fullest rank receives, then bytes of all ranks together."""
    return choice.inbound, choice.total


def orders(ranks: int, size: int) -> tuple[str, ...]:
    """The rank orders that differ for tensor-parallel groups of ``size`` among ``ranks``, the plain one first."""
    return ("inner", "outer") if 1 < size < ranks else ("inner",)


def choices(
    shapes: Shapes, dtype: str, ranks: int, size: int, nodes: Sequence[int] | None = None, dim: Dim = row_parallel
) -> Choices:
    """FSDP2 over ``ranks`` to rollouts of tensor parallel ``size`` on the same ranks. dim: along which dimension the rollout cuts a tensor
    (``cut_dims`` of a traced layout, or the dense decoders' usual)."""
    matched = shard_dims(shapes, ranks, dim)
    sources = {"first": sharded(shapes, dtype, [Cut(range(ranks), ranks)]),
               "matched": sharded(shapes, dtype, [Cut(range(ranks), ranks, lambda name, shape: matched.get(name, 0))])}  # fmt: skip
    targets = {order: tensor_parallel(shapes, dtype, size, ranks, outer=order == "outer", dim=dim) for order in orders(ranks, size)}
    return Choices.of(shapes, size, matched, sources, targets, nodes)


def _choice(dims: str, order: str, plan: TransferPlan) -> Choice:
    return Choice(dims, order, int(plan.stats.inbound.max(initial=0)), int(plan.stats.inbound.sum()), plan.stats.across)


def _less(one: Choice, other: Choice) -> str:
    if one.inbound == other.inbound:
        return f"{readable(one.total)} to all ranks together, not {readable(other.total)}"
    return f"{readable(one.inbound)} to the rank that receives most, not {readable(other.inbound)}"


def shard_dims(shapes: Shapes, ranks: int, dim: Dim = row_parallel) -> dict[str, int]:
    """The tensors that FSDP2 should shard along another dimension than 0, and which (``shard_placement_fn``). FSDP2 shards other
    dimensions than 0 only where the ranks divide them."""
    cuts = {name: dim(name, shape) for name, shape in shapes.items() if shape}
    return {name: cut for name, cut in cuts.items() if cut and shapes[name][cut] % ranks == 0}


def cut_dims(target: WeightLayout) -> dict[str, int]:
    """Along which dimension a layout, as an engine's trace gives it, cuts each tensor; those that are whole are left out. A tensor cut
    along several counts with the first."""
    cuts = {name: _cut_dim(spread) for name, spread in target.tensors.items()}
    return {name: dim for name, dim in cuts.items() if dim is not None}


def _cut_dim(spread: Spread) -> int | None:
    sizes = [lengths(box) for boxes in spread.boxes for box in boxes]
    return next((dim for dim, whole in enumerate(spread.shape) if any(size[dim] < whole for size in sizes)), None)
