"""Measure the bytes and the time of weight transfers.

Bytes are compared with the lower bound, and times with an all-gather and a plain copy.

    python benchmarks/reshard.py [--repeats 7] [--megabytes 222] [--parts large small four plans] [--json]

Ranks are processes with one thread each that communicate by gloo. They hold real FSDP2 and tensor-parallel
shards of a bf16 model; ZeRO-3's flat shards have the layout of DeepSpeed. ``gather`` gathers every complete
parameter on every rank, and copies the part that the rank needs. Most frameworks do this by default. For
FSDP2 it uses ``DTensor.full_tensor``, otherwise one all-gather for each parameter. ``memcpy`` copies as many
bytes as the rank's target occupies.

Times are medians over alternating repeats, for the slowest rank. Ratios in brackets use the fastest repeats.
With 4 ranks and a quarter of the model, only bytes and exactness are checked. Planning is timed in CPU
seconds, in one process, for the shapes of Qwen3-8B.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rlflow.training.weight_sync.boxes import lengths, volume, within
from rlflow.training.weight_sync.exchange import exchange
from rlflow.training.weight_sync.execute import Resharder
from rlflow.training.weight_sync.kinds import Cut, flat, replicated, row_parallel, sharded, tensor_parallel
from rlflow.training.weight_sync.layout import HELD, WeightLayout, join
from rlflow.training.weight_sync.planner import BUCKET, make_plan
from rlflow.training.weight_sync.segment import Segment
from rlflow.training.weight_sync.shards import ShardView, TensorViews, from_flat, held, pieces_of
from rlflow.training.weight_sync.transfer_plan import readable
from rlflow.training.weight_sync.transport import AllToAll

CELLS = ("FSDP2 → TP", "FSDP2 → DP", "ZeRO-3 → TP", "TP → TP1")
PARTS = ("large", "small", "four", "plans")
TIMES = ("gather", "alltoall", "segment", "memcpy", "verify")
QWEN3_8B = {"layers": 36, "hidden": 4096, "inner": 12288, "vocab": 151936, "q": 4096, "kv": 1024}


def decoder(layers: int, hidden: int, inner: int, vocab: int, q: int, kv: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Qwen3 model."""
    block = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "self_attn.q_norm": (128,),
        "self_attn.k_norm": (128,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    layered = {
        f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in block.items()
    }
    return {
        "model.embed_tokens.weight": (vocab, hidden),
        **layered,
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }


def small(megabytes: float) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model that has about ``megabytes`` MiB in bf16."""
    if megabytes < 8:
        return decoder(2, 128, 384, 512, 128, 64)
    layers = max(1, round((megabytes - 32) / 15.5))
    return decoder(layers, 896, 2304, 8192, 1024, 512)


def numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


# -- one rank
# ------------------------------------------------------------------------------------------------------------


@cache
def weight(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return the random weight with this name and shape. Each call returns the same values."""
    rng = torch.Generator().manual_seed(sum(map(ord, name)))
    return (
        torch.randint(-(1 << 15), 1 << 15, shape, generator=rng, dtype=torch.int16)
        .view(torch.bfloat16)
        .nan_to_num(0.0)
    )


def trainer(
    cell: str, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int
) -> tuple[dict[str, Tensor], dict[str, TensorViews]]:
    """Create the trainer's weights on a rank. Returns (live tensors, their views) by name."""
    wholes = {name: weight(name, shape) for name, shape in shapes.items()}
    mesh = init_device_mesh("cpu", (ranks,))
    if cell.startswith("FSDP2"):
        model = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(tensor) for name, tensor in wholes.items()}
        )
        fully_shard(model, mesh=mesh)
        live: dict[str, Tensor] = {name: model[name.replace(".", "/")] for name in shapes}
        return live, pieces_of(live.items())
    if cell.startswith("TP"):
        placed = {
            name: Replicate() if (dim := row_parallel(name, shape)) is None else Shard(dim)
            for name, shape in shapes.items()
        }
        live = {name: distribute_tensor(tensor, mesh, [placed[name]]) for name, tensor in wholes.items()}
        return live, pieces_of(live.items())
    sizes = {name: -(-tensor.numel() // ranks) for name, tensor in wholes.items()}
    parts = {
        name: tensor.reshape(-1)[rank * sizes[name] : (rank + 1) * sizes[name]].clone()
        for name, tensor in wholes.items()
    }
    return parts, {name: from_flat(name, parts[name], shapes[name], rank, ranks) for name in shapes}


def rollout(cell: str, shapes: dict[str, tuple[int, ...]], ranks: int) -> WeightLayout:
    """Return the layout of the generator's weights in a cell."""
    return (
        tensor_parallel(shapes, "bfloat16", ranks, ranks)
        if cell.endswith("TP")
        else replicated(shapes, "bfloat16", ranks)
    )


def empty(layout: WeightLayout, rank: int) -> dict[str, TensorViews]:
    """Allocate the tensors of a rank in a layout."""

    def view(box: Sequence[tuple[int, int]]) -> ShardView:
        return ShardView(box, torch.empty(lengths(box), dtype=torch.bfloat16))

    return {
        name: TensorViews(mine.shape, mine.dtype, tuple(map(view, mine.boxes)))
        for name, mine in layout.of(rank).items()
    }


class FullTensors:
    """Gathers each parameter with the trainer's own method, and copies this rank's part."""

    def __init__(self, live: dict[str, Tensor], views: dict[str, TensorViews]) -> None:
        self.live, self.views = live, views

    def run(self, version: int) -> None:
        for name, tensor in self.live.items():
            assert isinstance(tensor, DTensor)
            whole = tensor.detach().full_tensor()
            for piece in self.views[name].pieces:
                piece.view.copy_(whole[tuple(slice(low, high) for low, high in piece.box)])


class Gather:
    """Gathers each parameter with one all-gather, and copies this rank's part."""

    def __init__(
        self, source: WeightLayout, mine: dict[str, TensorViews], views: dict[str, TensorViews]
    ) -> None:
        self.source, self.mine, self.views = source, mine, views

    def run(self, version: int) -> None:
        for name, needed in self.views.items():
            whole = self.whole(name)
            for piece in needed.pieces:
                piece.view.copy_(whole[within(piece.box, tuple((0, size) for size in whole.shape))])

    def whole(self, name: str) -> Tensor:
        have = self.source.tensors[name]
        padded = torch.zeros(max(sum(map(volume, boxes)) for boxes in have.boxes), dtype=torch.bfloat16)
        own = torch.cat([piece.view.reshape(-1) for piece in self.mine[name].pieces])
        padded[: own.numel()] = own
        everything = [torch.empty_like(padded) for _ in have.boxes]
        dist.all_gather([part.view(torch.uint8) for part in everything], padded.view(torch.uint8))
        whole = torch.empty(have.shape, dtype=torch.bfloat16)
        for part, boxes in zip(everything, have.boxes, strict=True):
            sizes = [volume(box) for box in boxes]
            for box, entries in zip(boxes, part[: sum(sizes)].split(sizes), strict=True):
                whole[within(box, tuple((0, size) for size in whole.shape))] = entries.view(lengths(box))
        return whole


def timed(act: Callable[[], Any]) -> float:
    """Return the milliseconds of an action on this rank. All ranks start it at the same time."""
    dist.barrier()
    start = time.perf_counter()
    act()
    return 1000 * (time.perf_counter() - start)


def copier(views: dict[str, TensorViews]) -> Callable[[], None]:
    """Return a function that copies as many bytes as the views occupy."""
    into = [piece.view for mine in views.values() for piece in mine.pieces]
    out_of = [torch.ones_like(view) for view in into]
    return lambda: torch._foreach_copy_(into, out_of)


def exact(views: dict[str, TensorViews]) -> bool:
    """Whether the views have the right values. Clears the views afterwards."""
    for name, mine in views.items():
        whole = weight(name, mine.shape)
        for piece in mine.pieces:
            expected = whole[tuple(slice(low, high) for low, high in piece.box)]
            if not torch.equal(
                piece.view.contiguous().view(torch.int16), expected.contiguous().view(torch.int16)
            ):
                return False
            piece.view.fill_(-1)
    return True


def measure(cell: str, megabytes: float, rank: int, ranks: int, repeats: int) -> dict[str, Any]:
    """Measure one cell on one rank."""
    shapes = small(megabytes)
    live, mine = trainer(cell, shapes, rank, ranks)
    source, target = join(exchange(held(mine), HELD)), rollout(cell, shapes, ranks)
    views = empty(target, rank)
    start = time.perf_counter()
    plan = make_plan(source, target)
    planned = 1000 * (time.perf_counter() - start)
    gather = (
        FullTensors(live, views)
        if isinstance(next(iter(live.values())), DTensor)
        else Gather(source, mine, views)
    )
    ways: dict[str, Any] = {
        "gather": gather,
        "alltoall": Resharder(plan, rank, mine, views, AllToAll()),
        "segment": Resharder(plan, rank, mine, views, Segment(f"bench-{os.getppid()}")),
    }
    bits = {}
    for name, way in ways.items():
        way.run(1)
        bits[name] = exact(views)
    ways["segment"].run(2)
    verify = timed(ways["segment"].verify)
    acts: dict[str, Callable[[], Any]] = {name: (lambda way=way: way.run(2)) for name, way in ways.items()}
    acts["memcpy"] = copier(views)
    times: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(repeats):
        for name, act in acts.items():
            times[name].append(timed(act))
    stats = plan.stats
    for way in (ways["alltoall"], ways["segment"]):
        way.close()
    return {
        "exact": all(bits.values()),
        "inbound": ways["segment"].transport.received // (2 + repeats),
        "bound": int(stats.bound[rank]),
        "local": int(stats.local[rank]),
        "peak": stats.peak(rank),
        "plan": planned,
        "times": times | {"verify": [verify]},
    }


def work(meeting: str, rank: int, ranks: int, cells: list[str], megabytes: float, repeats: int) -> None:
    """Run one rank: measure all cells, and print the results as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(meeting, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=120),
    )
    print(json.dumps({cell: measure(cell, megabytes, rank, ranks, repeats) for cell in cells}), flush=True)
    dist.barrier()
    os._exit(0)


# -- all ranks
# ------------------------------------------------------------------------------------------------------------


def launched(ranks: int, cells: list[str], megabytes: float, repeats: int) -> list[dict[str, Any]]:
    """Start the ranks, and return the results of each rank."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        given = [str(Path(folder) / "meeting"), str(ranks), json.dumps(cells), str(megabytes), str(repeats)]
        started = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), *given],
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(ranks)
        ]
        try:
            ended = [process.communicate(timeout=560)[0] for process in started]
        finally:
            for process in started:
                process.kill()
    return [json.loads(out.splitlines()[-1]) for out in ended]


def slowest(found: list[dict[str, Any]], cell: str, name: str) -> list[float]:
    """Return the time of the slowest rank in each repeat."""
    return list(map(max, zip(*(one[cell]["times"][name] for one in found), strict=True)))


def rows(ranks: int, megabytes: float, repeats: int) -> list[dict[str, Any]]:
    """Measure all cells, and return the rows of the table."""
    found, made = launched(ranks, list(CELLS), megabytes, repeats), []
    for cell in CELLS:
        row: dict[str, Any] = {
            "cell": cell,
            "ranks": ranks,
            "exact": all(one[cell]["exact"] for one in found),
        }
        row["model"] = sum(numel(shape) for shape in small(megabytes).values()) * 2
        row |= {
            name: max(one[cell][name] for one in found)
            for name in ("inbound", "bound", "local", "peak", "plan")
        }
        row["over bound"] = row["inbound"] / row["bound"] if row["bound"] else float(row["inbound"] > 0)
        for name in TIMES if repeats else ("verify",):
            row[name], row[f"{name} fastest"] = (
                statistics.median(times := slowest(found, cell, name)),
                min(times),
            )
        made.append(row)
    return made


def plans() -> list[dict[str, Any]]:
    """Measure the CPU seconds of planning for Qwen3-8B, and return rows of the table."""
    shapes, made = decoder(**QWEN3_8B), []
    for ranks in (8, 64, 256):
        zero3, fsdp = flat(shapes, "bfloat16", ranks), sharded(shapes, "bfloat16", [Cut(range(ranks), ranks)])
        for name, source in (("FSDP2", fsdp), ("ZeRO-3", zero3)):
            for size in (1, 2, 8):
                target = tensor_parallel(shapes, "bfloat16", size, ranks)
                start = time.process_time()
                # another bucket size, because ZeRO-3 may have the same layout as FSDP2, whose plan is cached
                bucket = BUCKET - (name == "ZeRO-3")
                plan = make_plan(source, target, [rank // 8 for rank in range(ranks)], bucket)
                stats, spent = plan.stats, time.process_time() - start
                made.append(
                    {
                        "cell": f"{name} → TP{size} × DP{ranks // size}",
                        "ranks": ranks,
                        "seconds": spent,
                        "inbound": int(stats.inbound.max()),
                        "outbound": int(stats.outbound.max()),
                        "over bound": float(stats.inbound.sum() / max(1, stats.bound.sum())),
                        "buckets": len(plan.buckets),
                    }
                )
    return made


def ratio(row: dict[str, Any], one: str, other: str, digits: int) -> str:
    """Return the ratio of two medians as text, followed by the ratio of the fastest repeats in brackets."""
    return (
        f"{row[one] / row[other]:.{digits}f} ({row[f'{one} fastest'] / row[f'{other} fastest']:.{digits}f})"
    )


def show(moves: list[dict[str, Any]], planned: list[dict[str, Any]]) -> None:
    table = Table(
        "from → to",
        "ranks",
        "model",
        "exact",
        "in",
        "in / bound",
        "local",
        "extra memory",
        "gather, ms",
        "all-to-all, ms",
        "segment, ms",
        "memcpy, ms",
        "gather / segment",
        "segment / memcpy",
        "verify, ms",
    )
    for row in moves:
        times = [f"{row[name]:.1f}" for name in TIMES if name in row]
        if "gather" in row:
            times[4:4] = [ratio(row, "gather", "segment", 1), ratio(row, "segment", "memcpy", 2)]
        sizes = [
            readable(row["inbound"]),
            f"{row['over bound']:.3f}",
            readable(row["local"]),
            readable(row["peak"]),
        ]
        what = [row["cell"], str(row["ranks"]), readable(row["model"]), str(row["exact"]), *sizes]
        table.add_row(*what, *["-"] * (7 - len(times)), *times)
    second = Table(
        "Qwen3-8B from → to", "ranks", "plan, CPU s", "in, most", "out, most", "in / bound", "buckets"
    )
    for row in planned:
        second.add_row(
            row["cell"],
            str(row["ranks"]),
            f"{row['seconds']:.2f}",
            readable(row["inbound"]),
            readable(row["outbound"]),
            f"{row['over bound']:.3f}",
            str(row["buckets"]),
        )
    Console(width=200).print(table, second)


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        rank, meeting, ranks, cells, megabytes, repeats = sys.argv[2:8]
        work(meeting, int(rank), int(ranks), json.loads(cells), float(megabytes), int(repeats))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--megabytes", type=float, default=222, help="size of the large model in bf16")
    parser.add_argument("--json", action="store_true", help="one line of JSON per row")
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help="large and small: 2 ranks; four: 4 ranks, bytes and exactness only; plans: planning time",
    )
    given = parser.parse_args()
    parts = {
        "large": (2, given.megabytes, given.repeats),
        "small": (2, 1.0, given.repeats),
        "four": (4, given.megabytes / 4, 0),
    }
    moves = [row for part, settings in parts.items() if part in given.parts for row in rows(*settings)]
    planned = plans() if "plans" in given.parts else []
    if given.json:
        print("\n".join(json.dumps(row) for row in moves + planned))
    else:
        show(moves, planned)


if __name__ == "__main__":
    main()
