"""Random models, meshes and layouts, and ranks in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from rlflow.training.weight_sync.boxes import Box, lengths
from rlflow.training.weight_sync.execute import Resharder
from rlflow.training.weight_sync.kinds import Cut, flat, replicated, sharded
from rlflow.training.weight_sync.layout import Spread, WeightLayout
from rlflow.training.weight_sync.planner import make_plan
from rlflow.training.weight_sync.shards import ShardView, TensorViews, dtype_name, from_flat
from rlflow.training.weight_sync.transfer_plan import TransferPlan
from rlflow.training.weight_sync.transport import Parcels

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class Case:
    """A transfer between ranks. Trainers are the first ranks, generators the last; both may be the same."""

    source: WeightLayout
    target: WeightLayout
    node_of: tuple[int, ...]
    bucket: int
    zero3_ranks: int = 0  # ranks over which the source is flattened, or 0

    def plan(self) -> TransferPlan:
        return make_plan(self.source, self.target, self.node_of, self.bucket)


shapes = (
    st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)
    | st.tuples(st.integers(1, 40))
    | st.tuples(st.integers(1, 17), st.integers(1, 9))
)
models = st.lists(shapes, min_size=1, max_size=4).map(
    lambda found: {f"layer.{i}.weight": shape for i, shape in enumerate(found)}
)


@st.composite
def layouts(draw, model, ranks: int) -> tuple[WeightLayout, bool]:
    """Draw a layout of any kind, and whether it belongs to ZeRO-3."""
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(("replicated", "flat", "fsdp", "matched", "tensor parallel", "mesh")))
    if kind == "replicated":
        return replicated(model, dtype, ranks), False
    if kind == "flat":
        return flat(model, dtype, ranks), True
    dims = {name: draw(st.sampled_from([None, *range(len(shape))])) for name, shape in model.items()}
    size = draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    order = draw(st.permutations(range(ranks)))
    fsdp = Cut(order, ranks, (lambda name, shape: 0) if kind == "fsdp" else lambda name, shape: dims[name])
    heads = Cut([rank % size for rank in range(ranks)], size, lambda name, shape: dims[name])
    inner = Cut([rank // size for rank in range(ranks)], ranks // size)
    return sharded(
        model, dtype, {"tensor parallel": [heads], "mesh": [heads, inner]}.get(kind, [fsdp])
    ), False


def padded(layout: WeightLayout, before: int, after: int) -> WeightLayout:
    """Return the same layout, padded with ranks without a part."""
    tensors = {
        name: Spread(s.shape, s.dtype, ((),) * before + s.boxes + ((),) * after)
        for name, s in layout.tensors.items()
    }
    return WeightLayout(before + layout.ranks + after, tensors)


@st.composite
def cases(draw) -> Case:
    model, ranks = draw(models), draw(st.integers(1, 8))
    trainers = draw(st.integers(1, ranks))
    generators = draw(st.integers(1, ranks))
    (source, zero3), (target, _) = draw(layouts(model, trainers)), draw(layouts(model, generators))
    names = draw(st.permutations(list(model)))[: draw(st.integers(1, 4))]
    target = WeightLayout(generators, {name: target.tensors[name] for name in names})
    nodes = tuple(draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)))
    bucket = draw(st.sampled_from((8, 24, 64, 100, 1 << 20)))
    return Case(
        padded(source, 0, ranks - trainers),
        padded(target, ranks - generators, 0),
        nodes,
        bucket,
        trainers if zero3 else 0,
    )


def bits_of(shape: Sequence[int], dtype: str, seed: int) -> Tensor:
    """Draw any bits except NaN and infinities, because a cast may change the bits of a NaN."""
    chance = torch.Generator().manual_seed(seed)
    return (torch.randn(tuple(shape), generator=chance) * 8).to(getattr(torch, dtype))


def part(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(low, high) for low, high in box)]


def strided(values: Tensor, seed: int) -> Tensor:
    """Return the same values in memory of another order, like an engine with a transposed weight."""
    order = torch.randperm(values.dim(), generator=torch.Generator().manual_seed(seed)).tolist()
    back = sorted(range(values.dim()), key=order.__getitem__)
    return values.permute(order).contiguous().permute(back)


@dataclass
class World:
    """All ranks of a case with live memory."""

    case: Case
    wholes: dict[str, Tensor]
    sources: list[dict[str, TensorViews]]
    targets: list[dict[str, TensorViews]]

    @staticmethod
    def of(case: Case) -> World:
        wholes = {
            name: bits_of(spread.shape, spread.dtype, seed)
            for seed, (name, spread) in enumerate(case.source.tensors.items())
        }
        ranks = range(case.source.ranks)
        source = _flat if case.zero3_ranks else _pieces
        sources = [
            {name: source(name, case, rank, whole) for name, whole in wholes.items()} for rank in ranks
        ]
        targets = [
            {name: _empty(spread, rank) for name, spread in case.target.tensors.items()} for rank in ranks
        ]
        return World(case, wholes, sources, targets)

    def move(self) -> list[Resharder]:
        """Move the weights of all ranks, bucket by bucket, in this process."""
        plan = self.case.plan()
        ranks = [Resharder(plan, r, self.sources[r], self.targets[r], Parcels()) for r in range(plan.ranks)]
        came = [0] * plan.ranks
        for index in range(len(plan.buckets)):
            sent = [{peer: message.clone() for peer, message in rank.pack(index).items()} for rank in ranks]
            for rank in ranks:
                firsts = {peer: other.rounds[index].first.get(rank.rank) for peer, other in enumerate(ranks)}
                messages = {peer: sent[peer][first] for peer, first in firsts.items() if first is not None}
                rank.unpack(index, messages)
                came[rank.rank] += sum(message.numel() for message in messages.values())
        for rank in ranks:
            rank.copy_local()
            rank.finish(1, came[rank.rank])
        return ranks


def _pieces(name: str, case: Case, rank: int, whole: Tensor) -> TensorViews:
    spread = case.source.tensors[name]
    pieces = (ShardView(box, strided(part(whole, box).clone(), rank)) for box in spread.boxes[rank])
    return TensorViews(spread.shape, spread.dtype, tuple(pieces))


def _flat(name: str, case: Case, rank: int, whole: Tensor) -> TensorViews:
    """Return a flat part with padding that must never be read, like DeepSpeed's."""
    if rank >= case.zero3_ranks:
        return TensorViews(tuple(whole.shape), dtype_name(whole), ())
    size = -(-whole.numel() // case.zero3_ranks)
    mine = whole.reshape(-1)[rank * size : (rank + 1) * size]
    memory = torch.full((size,), float("nan"), dtype=whole.dtype)
    memory[: len(mine)] = mine
    return from_flat(name, memory, tuple(whole.shape), rank, case.zero3_ranks)


def _empty(spread: Spread, rank: int) -> TensorViews:
    dtype = getattr(torch, spread.dtype)
    views = (
        ShardView(box, strided(torch.full(lengths(box), -77.0, dtype=dtype), rank))
        for box in spread.boxes[rank]
    )
    return TensorViews(spread.shape, spread.dtype, tuple(views))
