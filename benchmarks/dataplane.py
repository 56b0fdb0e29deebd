"""Measure the time to pack a batch for another process, and the time to distribute rows over ranks.

The transfer itself is not measured.

    python benchmarks/dataplane.py [--rows 4096] [--tokens 2048]

Rows have 0 to --tokens tokens. The batch has the columns that an update of PPO reads. For comparison, the
time of a plain copy of the same number of bytes is also printed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from rlflow import Batch
from rlflow.author.axis import Axis
from rlflow.author.batch import Data
from rlflow.author.columns import standard_kind
from rlflow.cluster.sharding.route import Routes
from rlflow.cluster.sharding.shard_map import RemoteColumn, Shard, ShardMap, WorkerId
from rlflow.cluster.sharding.split import balanced, keep_or_balance, merge_order, units_of_rows
from rlflow.execution.wire.column_wire import pack, unpack

RANKS = 8
COLUMNS = ("tokens", "mask", "sampled_logprobs", "logprobs", "values", "advantages", "returns")


def batch_of(rows: int, longest: int) -> Batch:
    """Return a batch with ``rows`` rows of 0 to ``longest`` tokens."""
    lengths = torch.randint(0, longest + 1, (rows,), generator=torch.Generator().manual_seed(0))
    data = {}
    for name in COLUMNS:
        kind = standard_kind(name)
        assert kind is not None
        data[name] = Data(
            kind, torch.ones(int(lengths.sum()), dtype=getattr(torch, str(kind.dtype))), lengths
        )
    return Batch(Axis.fresh(rows), data)


def seconds(call: Callable[[], object], times: int = 7) -> float:
    """Return the median time of a call in seconds, over ``times`` calls after one warm-up call."""
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def wire(rows: int, longest: int) -> None:
    """Print the times to pack and unpack a batch."""
    batch = batch_of(rows, longest)
    frame = pack(batch)
    calls = {
        "copy": lambda: bytearray(frame),
        "pack": lambda: pack(batch),
        "unpack": lambda: unpack(frame),
    }
    print(f"{rows} rows, {len(frame) / 1e6:.1f} MB")
    for name, call in calls.items():
        took = seconds(call)
        print(f"  {name:<16} {took * 1e3:9.3f} ms {len(frame) / took / 1e9:9.2f} GB/s")


def held(split: list[torch.Tensor], rows: int) -> Batch:
    """Return a batch as the driver holds it, with one column that is stored on the ranks of a pool.

    ``split``: the values on each rank. ``rows``: number of rows in total.
    """
    shards = [
        Shard(WorkerId("all", rank), rank, len(part), lambda *_: None) for rank, part in enumerate(split)
    ]
    scores = RemoteColumn(standard_kind("scores"), ShardMap.of(shards, split, rows), None, "scores", 4 * rows)  # type: ignore[arg-type]
    return Batch(Axis.fresh(rows), {"scores": scores})


def split(rows: int, longest: int) -> None:
    """Print the times to distribute rows over ranks."""
    tokens = torch.randint(0, longest + 1, (rows,), generator=torch.Generator().manual_seed(0))
    units, even = units_of_rows(None, rows), list(torch.arange(rows).tensor_split(RANKS))
    found = balanced(units, tokens, RANKS)
    batch = held(even, rows)
    calls = {
        "units_of_rows": lambda: units_of_rows(None, rows),
        "balanced": lambda: balanced(units, tokens, RANKS),
        "keep_or_balance": lambda: keep_or_balance(found, units, tokens),
        "Routes": lambda: list(
            map(Routes(batch).to, found, (WorkerId("all", rank) for rank in range(RANKS)))
        ),
        "merge_order": lambda: merge_order(found),
    }
    print(f"{rows} rows on {RANKS} ranks")
    for name, call in calls.items():
        print(f"  {name:<16} {seconds(call) * 1e3:9.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--tokens", type=int, default=2048)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wire(1, 16)
    wire(arguments.rows, arguments.tokens)
    split(arguments.rows, arguments.tokens)


if __name__ == "__main__":
    main()
