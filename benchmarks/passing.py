"""Measure the time to transfer weights between two pools.

The transports are shared memory, Ray's object store, and complete tensors.

    python benchmarks/passing.py [--repeats 7] [--megabytes 222] [--json]

Two Ray workers hold the FSDP2 shards of a bf16 model. Two other workers need the shards of tensor parallel 2.
All run on this machine with one thread each. ``whole`` is the second half of ``--weights gather``: rank 0 has
gathered the model and sends it to every rank, which keeps its shard. ``memcpy`` copies as many bytes as a
rank's shard occupies. Times are medians over repeats, measured by the driver.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from reshard import copier, empty, exact, small, weight

from rlflow.cluster import launch
from rlflow.cluster.rpc.actor import make_pool
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.wire_tensors import pack_tensors, unpack_tensors
from rlflow.cluster.weights.endpoints import End, Receiver, Sender
from rlflow.cluster.weights.transfer import WeightTransfer
from rlflow.training.weight_sync.kinds import Cut, sharded, tensor_parallel
from rlflow.training.weight_sync.proof import Destinations
from rlflow.training.weight_sync.shards import ShardView, TensorViews
from rlflow.training.weight_sync.transfer_plan import readable

RANKS = 2
WAYS = ("whole", "store", "segment", "memcpy")


class Side:
    """A worker of one pool. Instead of a trainer or generator, it has memory with the same layout."""

    def __init__(self, megabytes: float, rank: int, sends: bool) -> None:
        torch.set_num_threads(1)
        self.shapes, self.rank, self.sends = small(megabytes), rank, sends
        self.pieces = (
            self._held() if sends else empty(tensor_parallel(self.shapes, "bfloat16", RANKS, RANKS), rank)
        )
        self.end: End | None = None

    def _held(self) -> dict[str, TensorViews]:
        layout = sharded(self.shapes, "bfloat16", [Cut(range(RANKS), RANKS)]).of(self.rank)
        parts = {
            name: [(box, _part(weight(name, held.shape), box).clone()) for box in held.boxes]
            for name, held in layout.items()
        }
        return {
            name: TensorViews(layout[name].shape, "bfloat16", tuple(ShardView(*part) for part in mine))
            for name, mine in parts.items()
        }

    def passing(self, role: str, step: str, *arguments: Any) -> Any:
        """Run one step of a weight transfer. The method has the interface of a run's worker."""
        if step == "begin":
            trainer = SimpleNamespace(pieces=lambda: self.pieces)
            generator = SimpleNamespace(
                destinations=lambda tensors: Destinations(self.pieces, {}, {}),
                writing=self._writing,
                load=list,
            )
            model: Any = SimpleNamespace(trainer=trainer if self.sends else None, generator=generator)
            self.end = Sender(model, "cpu") if self.sends else Receiver(model, "cpu")
        return getattr(self.end, step)(*arguments)

    @contextlib.contextmanager
    def _writing(self, version: int) -> Iterator[None]:
        yield

    def whole(self) -> Any:
        """Return the complete model, packed as after gathering it."""
        return pack_tensors({name: weight(name, shape) for name, shape in self.shapes.items()})

    def receive(self, payload: Any) -> None:
        """Copy this rank's shards from a packed model."""
        for name, tensor in unpack_tensors(payload).items():
            for piece in self.pieces[name].pieces:
                piece.view.copy_(_part(tensor, piece.box))

    def memcpy(self) -> float:
        """Return the milliseconds of a plain copy."""
        self.copy = getattr(self, "copy", None) or copier(self.pieces)
        start = time.perf_counter()
        self.copy()
        return 1000 * (time.perf_counter() - start)

    def exact(self) -> bool:
        """Whether this rank's shards have the right values."""
        return exact(self.pieces)


def _part(tensor: Tensor, box: tuple[tuple[int, int], ...]) -> Tensor:
    return tensor[tuple(slice(low, high) for low, high in box)]


def pools(megabytes: float) -> tuple[Pool[Any], Pool[Any]]:
    """Start the trainer's pool and the generator's pool, and return both."""
    environment = {"env_vars": {"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}}
    made: list[Pool[Any]] = [
        make_pool(
            name,
            Side,
            RANKS,
            lambda rank, sends=sends: (megabytes, rank, sends),
            None,
            runtime_env=environment,
        )
        for name, sends in (("train", True), ("rollout", False))
    ]
    for pool in made:
        pool.made(300.0).result()
    return made[0], made[1]


def measured(megabytes: float, repeats: int) -> dict[str, Any]:
    """Measure all transports, and return the row of the table."""
    train, rollout = pools(megabytes)
    transfers = {
        name: WeightTransfer("actor", train, rollout, how)
        for name, how in (("store", "alltoall"), ("segment", "segment"))
    }
    row: dict[str, Any] = {"model": sum(2 * torch.Size(shape).numel() for shape in small(megabytes).values())}
    times: dict[str, list[float]] = {name: [] for name in WAYS}
    for name in ("whole", *transfers):  # senders and receivers can use only one transport at a time
        if name in transfers:
            transfers[name].bind(60.0)
        for repeat in range(repeats + 1):
            start = time.perf_counter()
            row |= _once(name, transfers, train, rollout, repeat)
            # skip the first repeat, in which memory is touched for the first time
            times[name] += [1000 * (time.perf_counter() - start)] * (repeat > 0)
        row[f"{name} exact"] = all(rollout.call("exact", seconds=60.0).result())
    times["memcpy"] = [max(rollout.call("memcpy").result()) for _ in range(repeats + 1)][1:]
    for name, each in times.items():
        row[name], row[f"{name} fastest"] = statistics.median(each), min(each)
    return row


def _once(
    name: str, transfers: Mapping[str, WeightTransfer], train: Pool[Any], rollout: Pool[Any], version: int
) -> dict[str, Any]:
    if name == "whole":
        rollout.call("receive", train.send(0, "whole", group="model"), seconds=60.0, group="model").result()
        return {}
    moved = transfers[name].move(version, 60.0)
    return {"inbound": moved["inbound"], "bound": moved["bound"], f"{name} extra": moved["extra"]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--megabytes", type=float, default=222, help="size of the model in bf16")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    launch.start(None, 2 * RANKS)
    try:
        row = measured(given.megabytes, given.repeats)
    finally:
        ray.shutdown()
    if given.json:
        print(json.dumps(row))
        return
    print(
        f"{readable(row['model'])} in bf16, FSDP2 on 2 ranks to TP 2 on 2 other ranks: "
        f"{readable(int(row['inbound']))} to each, {row['inbound'] / row['bound']:.3f} times the bound"
    )
    for name in WAYS:
        extra = (
            f", {readable(int(row[f'{name} extra']))} more than the model" if f"{name} extra" in row else ""
        )
        print(
            f"  {name:8} {row[name]:8.1f} ms (fastest {row[f'{name} fastest']:.1f}), "
            f"{row[name] / row['memcpy']:.2f} x memcpy{extra}, exact: {row.get(f'{name} exact', '-')}"
        )


if __name__ == "__main__":
    main()
