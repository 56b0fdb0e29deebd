"""Checks in one rank of a gloo group that moves weights between real shards: FSDP2, tensor parallel, both,
ZeRO-3's flat parts.
"""

import os

import torch
import torch.distributed as dist
from strategies import bits_of, part
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlflow.cluster.weights.same_ranks import first_that_opens, ways
from rlflow.errors import PlanError
from rlflow.training.weight_sync.boxes import lengths
from rlflow.training.weight_sync.execute import Resharder
from rlflow.training.weight_sync.handles import Handles
from rlflow.training.weight_sync.kinds import flat, replicated, row_parallel, tensor_parallel
from rlflow.training.weight_sync.layout import WeightLayout, join
from rlflow.training.weight_sync.planner import make_plan
from rlflow.training.weight_sync.segment import ROOT, Segment
from rlflow.training.weight_sync.shards import (
    ShardView,
    TensorViews,
    from_dtensor,
    from_flat,
    held,
    pieces_of,
)
from rlflow.training.weight_sync.transport import AllToAll, TransferError
from rlflow.training.weight_sync.verify import bits

RUN = f"test {os.getpid()}"  # the parent process of the ranks
WAYS = {"alltoall": AllToAll, "segment": lambda: Segment(RUN), "handles": lambda: Handles("cpu")}
SHAPES = {
    "embed.weight": (37, 12),
    "q_proj.weight": (24, 12),
    "o_proj.weight": (12, 24),
    "norm.weight": (12,),
    "bias": (1,),
}


def wholes(dtype: str, version: int) -> dict[str, Tensor]:
    return {name: bits_of(shape, dtype, 100 * version + i) for i, (name, shape) in enumerate(SHAPES.items())}


class Model(nn.Module):
    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.held = nn.ParameterDict(
            {name.replace(".", "_"): nn.Parameter(tensor.clone()) for name, tensor in tensors.items()}
        )

    def named(self) -> dict[str, Tensor]:
        return {name: self.held[name.replace(".", "_")] for name in SHAPES}


def fsdp(tensors: dict[str, Tensor], mesh: DeviceMesh, dims=lambda p: None) -> dict[str, Tensor]:
    model = Model(tensors)
    fully_shard(model, mesh=mesh, shard_placement_fn=dims)
    return model.named()


def fsdp_on_tensor_parallel(tensors: dict[str, Tensor], ranks: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    model = Model(tensors)
    for name, parameter in list(model.held.items()):
        dim = 0 if parameter.shape[0] % 2 == 0 else None
        placement = Replicate() if dim is None else Shard(dim)
        model.held[name] = nn.Parameter(distribute_tensor(parameter.data, mesh["tp"], [placement]))
    fully_shard(model, mesh=mesh["dp"])
    return model.named()


def sources(dtype: str, rank: int, ranks: int) -> dict[str, tuple[dict[str, Tensor], dict[str, TensorViews]]]:
    """Return by kind: the trainer's live tensors, and this rank's parts of them."""
    tensors, line = wholes(dtype, 0), init_device_mesh("cpu", (ranks,))
    made = {
        "plain": {name: tensor.clone() for name, tensor in tensors.items()},
        "fsdp": fsdp(tensors, line),
        "fsdp matched": fsdp(tensors, line, lambda p: Shard(1) if p.shape == (12, 24) else None),
        "tensor parallel": {
            name: distribute_tensor(
                t, line, [Shard(d) if (d := row_parallel(name, t.shape)) is not None else Replicate()]
            )
            for name, t in tensors.items()
        },
        "fsdp of tensor parallel": fsdp_on_tensor_parallel(tensors, ranks),
    }
    found = {kind: (live, pieces_of(live.items())) for kind, live in made.items()}
    parts = {name: flat_part(tensor, rank, ranks) for name, tensor in tensors.items()}
    pieces = {name: from_flat(name, parts[name], SHAPES[name], rank, ranks) for name in SHAPES}
    return found | {"zero3": (parts, pieces)}


def flat_part(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    size = -(-tensor.numel() // ranks)
    part = torch.full((size,), float("nan"), dtype=tensor.dtype)
    mine = tensor.reshape(-1)[rank * size : (rank + 1) * size]
    part[: len(mine)] = mine
    return part


def update(live: dict[str, Tensor], dtype: str, version: int, rank: int, ranks: int) -> None:
    """Write new values into the same memory, like an optimizer."""
    for name, value in wholes(dtype, version).items():
        tensor = live[name]
        if isinstance(tensor, DTensor):
            local = from_dtensor(name, tensor).pieces
            for piece in local:
                piece.view.copy_(part(value, piece.box))
        elif tensor.shape == value.shape and len(live["q_proj.weight"].shape) > 1:
            tensor.copy_(value)
        else:
            tensor.copy_(flat_part(value, rank, ranks))


def targets(dtype: str, ranks: int) -> dict[str, WeightLayout]:
    return {
        "replicas": replicated(SHAPES, dtype, ranks),
        "tensor parallel": tensor_parallel(SHAPES, dtype, ranks, ranks),
        "flat": flat(SHAPES, dtype, ranks),
        "last rank alone": alone(replicated(SHAPES, dtype, ranks)),
    }


def alone(layout: WeightLayout) -> WeightLayout:
    return join([{}] * (layout.ranks - 1) + [layout.of(layout.ranks - 1)])


def views(layout: WeightLayout, rank: int) -> dict[str, TensorViews]:
    def view(box, dtype: str) -> ShardView:
        return ShardView(box, torch.full(lengths(box), -77.0, dtype=getattr(torch, dtype)))

    shards = layout.of(rank)
    return {
        name: TensorViews(mine.shape, mine.dtype, tuple(view(box, mine.dtype) for box in mine.boxes))
        for name, mine in shards.items()
    }


def wrong(found: dict[str, TensorViews], expected: dict[str, Tensor]) -> list[str]:
    return [
        f"{name} {piece.box}"
        for name, mine in found.items()
        for piece in mine.pieces
        if not torch.equal(bits(piece.view), bits(part(expected[name], piece.box).to(piece.view.dtype)))
    ]


def moved(
    source: WeightLayout,
    target: WeightLayout,
    mine: dict[str, TensorViews],
    live,
    kind: str,
    dtype: str,
    rank: int,
    ranks: int,
) -> list[str]:
    problems = []
    ways = [(name, buffers) for name in WAYS for buffers in ((2, 1) if kind == "fsdp" else (2,))]
    for transport, buffers in ways:
        way = WAYS[transport]()
        into = views(target, rank)
        resharder = Resharder(
            make_plan(source, target, bucket=3000), rank, mine, into, way, buffers=buffers, verify_every=1
        )
        for version in (1, 2):
            update(live, dtype, version, rank, ranks)
            resharder.run(version)
            problems += [
                f"{transport} {buffers} v{version}: {name}" for name in wrong(into, wholes(dtype, version))
            ]
        resharder.close()
    return problems


def all_layouts(rank: int, ranks: int) -> dict[str, list[str]]:
    found = {}
    for dtype, wanted in (("float32", "bfloat16"), ("bfloat16", "float32")):
        for kind, (live, mine) in sources(dtype, rank, ranks).items():
            if dtype == "bfloat16" and kind != "fsdp":
                continue
            told: list = [None] * ranks
            dist.all_gather_object(told, held(mine))
            for name, target in targets(wanted, ranks).items():
                found[f"{kind} {dtype} to {name} {wanted}"] = moved(
                    join(told), target, mine, live, kind, dtype, rank, ranks
                )
    return found


def hurried(rank: int, ranks: int) -> dict[str, list[str]]:
    """Run transfers back to back. Rank 0, which checks the received values, lags behind the others."""
    layout, target = flat(SHAPES, "float32", ranks), replicated(SHAPES, "float32", ranks)
    live = {name: flat_part(tensor, rank, ranks) for name, tensor in wholes("float32", 0).items()}
    mine = {name: from_flat(name, part, SHAPES[name], rank, ranks) for name, part in live.items()}
    found = {}
    for name, bucket, way in (
        ("one bucket", 1 << 20, "segment"),
        ("many", 3000, "segment"),
        ("handles", 3000, "handles"),
    ):
        into = views(target, rank)
        resharder = Resharder(make_plan(layout, target, bucket=bucket), rank, mine, into, WAYS[way]())
        problems = []
        for version in range(20):
            update(live, "float32", version, rank, ranks)
            resharder.run(version)
            problems += wrong(into, wholes("float32", version)) if rank == 0 else []
        resharder.close()
        found[f"hurried, {name}"] = problems
    return found


def lies(rank: int, ranks: int) -> dict[str, list[str]]:
    """Check that errors are detected: other versions, overwritten memory, too little shared memory."""
    layout, target = flat(SHAPES, "float32", ranks), replicated(SHAPES, "float32", ranks)
    parts = {name: flat_part(tensor, rank, ranks) for name, tensor in wholes("float32", 0).items()}
    mine = {name: from_flat(name, part, SHAPES[name], rank, ranks) for name, part in parts.items()}
    found = {}
    for way in (made() for made in WAYS.values()):
        into = views(target, rank)
        resharder = Resharder(make_plan(layout, target), rank, mine, into, way)
        found[f"{type(way).__name__} version"] = expect(
            lambda r=resharder: r.run(7 + (rank == 0)), "send other versions"
        )
        resharder.run(9)
        if rank == ranks - 1:
            into["embed.weight"].pieces[0].view[5, 5] += 1
        verdict = "embed.weight" if rank == ranks - 1 else ""
        found[f"{type(way).__name__} digest"] = expect(resharder.verify, verdict)
        resharder.close()
    turned = DeviceMesh("cpu", list(reversed(range(ranks))))
    found["turned mesh"] = expect(
        lambda: pieces_of(fsdp(wholes("float32", 0), turned).items()),
        "does not determine the shard of each rank",
    )
    small = Segment(RUN)
    found["too little memory"] = expect(
        lambda: small.open((1 << 46) * (rank == 0), 0, 2), "too small for a bucket"
    )
    found["too little to share"] = expect(
        lambda: Handles("cpu").open((1 << 60) * (rank == 0), 0, 2), "cannot share the memory"
    )
    found["another way"] = (
        []
        if otherwise(make_plan(layout, target), rank, mine, into) == "alltoall"
        else ["it did not get through"]
    )
    dist.barrier()
    found["left over"] = [path.name for path in ROOT.glob(f"rlflow-{small.run}-*")]
    return found


def otherwise(plan, rank, mine, into) -> str:
    """Move weights although no process can open the memory of a GPU: one has none."""

    def bound(way: str) -> Resharder:
        no_gpu = "cuda" if torch.cuda.device_count() == 0 else "cuda:99"
        return Resharder(plan, rank, mine, into, Handles(no_gpu) if way == "handles" else AllToAll())

    resharder = first_that_opens(bound, ways("auto", "cuda", one_machine=True))
    resharder.run(1)
    return resharder.transport.name


def expect(act, message: str) -> list[str]:
    try:
        act()
    except (TransferError, PlanError) as problem:
        return [] if message and message in str(problem) else [str(problem)]
    return ["nothing was noticed"] if message else []


def checked(rank: int, ranks: int) -> dict[str, list[str]]:
    """Return the problems by case, none if all is well; in a group of all ranks."""
    # shares CPU memory instead of CUDA handles
    torch.multiprocessing.set_sharing_strategy("file_system")
    return all_layouts(rank, ranks) | hurried(rank, ranks) | lies(rank, ranks)
