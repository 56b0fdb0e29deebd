"""Check two ranks on one device: weight transfer by shared memory handles, communication backend, a rank that
dies.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from gpu.check import Check, at_most, holds, measured, untested
from gpu.ground import Ground
from gpu.models import SHAPES
from gpu.ranks import RankError, together
from rlflow.cluster.group import backend_of, gpu, join
from rlflow.training.peers import Peers
from rlflow.training.weight_sync.exchange import TEXT, exchange
from rlflow.training.weight_sync.execute import Resharder
from rlflow.training.weight_sync.handles import Handles
from rlflow.training.weight_sync.kinds import flat, replicated
from rlflow.training.weight_sync.planner import make_plan
from rlflow.training.weight_sync.shards import ShardView, TensorViews, from_flat
from rlflow.training.weight_sync.transport import AllToAll

RANKS = 2
VERSIONS = 3
MIB = 2**20


def checks(ground: Ground) -> Iterator[Check]:
    yield from moved(ground, "handles")
    yield from moved(ground, "alltoall")
    yield from talk(ground)
    yield from nccl(ground)
    yield from death(ground)


def moved(ground: Ground, way: str) -> Iterator[Check]:
    """Transfer ZeRO-3's flat shards into a complete copy on each rank, with the transport ``way``."""
    try:
        (right, seconds, copy, left, received), *others = together(ground, RANKS, move, way)
    except RankError as error:
        yield Check(f"weights by {way}", "failed", why=str(error))
        return
    yield holds(f"weights by {way} have the same bits", right and all(each[0] for each in others))
    yield measured(f"time by {way}", seconds * 1e3, "ms", why=f"{received / MIB:.0f} MiB into each rank")
    yield measured(f"time by {way} ÷ time of a plain copy", seconds / copy)
    if ground.gpu:
        yield at_most(f"memory left on the device after {way} is closed", left / MIB, 4.0, "MiB")


def shapes(ground: Ground) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a few matrices, and of a vector that the ranks cannot divide evenly."""
    wide = SHAPES["small" if ground.small else "0.6b"]
    hidden, inner, layers = wide["hidden_size"], wide["intermediate_size"], ground.rows(2, 8)
    found = {f"layers.{i}.{name}": (inner, hidden) for i in range(layers) for name in ("gate", "up")}
    return found | {"embed": (wide["vocab_size"], hidden), "norm": (hidden + 1,)}


def tensors(ground: Ground, version: int) -> dict[str, torch.Tensor]:
    """Return random tensors for a weight version, the same on all ranks."""
    draw = torch.Generator(ground.device).manual_seed(version)
    return {
        name: torch.randn(shape, generator=draw, dtype=torch.bfloat16, device=ground.device)
        for name, shape in shapes(ground).items()
    }


def part(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a rank's part of a flattened tensor. Padding gives all ranks parts of the same size."""
    size = -(-tensor.numel() // RANKS)
    flat_ = tensor.new_zeros(size * RANKS)
    flat_[: tensor.numel()] = tensor.reshape(-1)
    return flat_[rank * size : (rank + 1) * size]


def move(
    rank: int, ranks: int, meeting: str, ground: Ground, way: str
) -> tuple[bool, float, float, int, int]:
    """Transfer weights on one rank, and close the transport.

    Returns (whether the weights arrived correctly, seconds of a transfer, seconds of a plain copy, bytes left
    on the device, bytes received in a transfer). ``meeting``: where the ranks meet. ``way``: the transport.
    """
    begin(rank, meeting, ground)
    before = ground.allocated()
    right, seconds, copy, came = transfers(rank, ranks, ground, way)
    dist.barrier()  # wait until all ranks have closed
    ground.free()
    return right, seconds, copy, ground.allocated() - before, came


def transfers(rank: int, ranks: int, ground: Ground, way: str) -> tuple[bool, float, float, int]:
    """Transfer several versions of the weights on one rank, and check them."""
    mine = {name: part(tensor, rank).clone() for name, tensor in tensors(ground, 0).items()}
    target = {
        name: torch.zeros(shape, dtype=torch.bfloat16, device=ground.device)
        for name, shape in shapes(ground).items()
    }
    plan = make_plan(flat(shapes(ground), "bfloat16", ranks), replicated(shapes(ground), "bfloat16", ranks))
    transport = Handles(ground.device) if way == "handles" else AllToAll(None, ground.device)
    resharder = Resharder(
        plan,
        rank,
        {name: from_flat(name, held, shapes(ground)[name], rank, ranks) for name, held in mine.items()},
        {name: whole(tensor) for name, tensor in target.items()},
        transport,
        verify_every=2,
    )
    right = True
    for version in range(VERSIONS):
        new = tensors(ground, version)
        for name, tensor in new.items():
            mine[name].copy_(part(tensor, rank))
        resharder.run(version)
        right &= all(torch.equal(target[name], tensor) for name, tensor in new.items())
    came = transport.received // VERSIONS
    seconds = timed(ground, lambda: resharder.run(VERSIONS))
    copies = [torch.empty_like(tensor) for tensor in target.values()]
    copy = timed(ground, lambda: torch._foreach_copy_(copies, list(target.values())))
    dist.barrier()
    resharder.close()
    return right, seconds, copy, came


def whole(tensor: torch.Tensor) -> TensorViews:
    """Return a complete tensor as the views that a weight transfer takes."""
    box = tuple((0, size) for size in tensor.shape)
    return TensorViews(tuple(tensor.shape), "bfloat16", (ShardView(box, tensor),))


def timed(ground: Ground, call: Any) -> float:
    """Return the seconds of the fastest of 6 calls. All ranks start each call at the same time."""
    found = []
    for _ in range(6):
        ground.settle()
        dist.barrier()
        began = time.perf_counter()
        call()
        ground.settle()
        found.append(time.perf_counter() - began)
    return min(found)


def begin(rank: int, meeting: str, ground: Ground) -> None:
    """Join the process group of the ranks. ``meeting``: where the ranks meet."""
    torch.set_num_threads(1)
    if not ground.gpu:
        torch.multiprocessing.set_sharing_strategy("file_system")  # replaces CUDA's handles on a CPU
    join(meeting, rank, RANKS, ground.device)


# -- communication backend
# ------------------------------------------------------------------------------------------------------------


def talk(ground: Ground) -> Iterator[Check]:
    """Sum gradients over ranks that share a device, and exchange messages between them."""
    expected = "gloo" if not ground.gpu else backend_of(["the same"] * RANKS)
    try:
        found = together(ground, RANKS, add, expected)
    except RankError as error:
        yield Check("ranks that share a device communicate", "failed", why=str(error))
        return
    yield holds(
        "ranks that share a device use gloo", all(backend == "gloo" for backend, _ in found), str(found)
    )
    yield holds("ranks that share a device add their gradients", all(right for _, right in found))


def add(rank: int, ranks: int, meeting: str, ground: Ground, expected: str) -> tuple[str, bool]:
    """Run one rank: sum gradients and exchange device names.

    Returns (communication backend, whether both worked).
    """
    begin(rank, meeting, ground)
    weight = torch.zeros(100, device=ground.device)
    weight.grad = torch.full((100,), rank + 1.0, device=ground.device)
    Peers().add_gradients([weight])
    devices = exchange(gpu() if ground.gpu else "a CPU", TEXT)
    dist.barrier()
    return str(dist.get_backend()), bool((weight.grad == 3.0).all()) and len(set(devices)) == 1


def nccl(ground: Ground) -> Iterator[Check]:
    """Try NCCL with two ranks on one device. If NCCL refuses, the check quotes its error."""
    if not ground.gpu:
        yield untested("NCCL with two ranks on one device", "NCCL needs a GPU")
        return
    try:
        found = together(ground, RANKS, sum_by_nccl, seconds=25.0)
        yield holds("NCCL with two ranks on one device", found == [3.0] * RANKS, f"sums {found}")
    except RankError as error:
        yield untested("NCCL with two ranks on one device", f"NCCL refuses: {error}")


def sum_by_nccl(rank: int, ranks: int, meeting: str, ground: Ground) -> float:
    """Sum numbers over the ranks with NCCL."""
    dist.init_process_group("nccl", store=dist.FileStore(meeting, ranks), rank=rank, world_size=ranks)
    tensor = torch.full((1,), rank + 1.0, device="cuda")
    dist.all_reduce(tensor)
    return float(tensor)


# -- a rank that dies
# ------------------------------------------------------------------------------------------------------------


def death(ground: Ground) -> Iterator[Check]:
    """Check that the device memory of a killed rank is freed, even if another rank has mapped it."""
    if not ground.gpu:
        yield untested("memory of a rank that dies", "it is measured only on a GPU")
        return
    before = torch.cuda.mem_get_info()[0]
    left = together(ground, RANKS, die, dead=(1,))[0]
    after = torch.cuda.mem_get_info()[0]
    yield holds("a rank outlives another that is killed", left)
    yield at_most("device memory still in use after a rank was killed", (before - after) / MIB, 64.0, "MiB")


def die(rank: int, ranks: int, meeting: str, ground: Ground) -> bool:
    """Map shared memory on each rank, and kill rank 1."""
    begin(rank, meeting, ground)
    transport = Handles(ground.device)
    transport.open(256 * MIB, 0, 2)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)  # the other rank is dead by now, but this rank is not notified
    transport.close()
    return True
