"""Calls of rlflow to a pool of workers.

A stage reads nine columns (one int64, eight float32) and produces one. verl's driver holds the columns and
gets the result. rlflow stores columns on workers, so there are four cases:

- ``stays``: a call inside a graph: each rank already has its rows, and the result stays on the ranks.
- ``moves``: a pool with half as many ranks has the inputs: every rank fetches rows; the result stays on the ranks.
- ``touched``: the driver has the columns and sends them to the ranks; the result stays on the ranks.
- ``returned``: the driver has the columns and gets the result (``Pool.call_batch``), as in verl.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.benchmarks.peers._calls import NAMES, Iterations
from rlflow.cluster.rpc.actor import make_pool
from rlflow.cluster.sharding.shard_map import row_tokens
from rlflow.cluster.sharding.split import balanced, units_of_rows
from rlflow.execution.engine import CallOptions
from rlflow.execution.wire.column_wire import BatchFrame
from rlflow.runs.api import Roles, roles

STARTED = 300.0  # maximum number of seconds for workers to start
POOL = "all"
HALF = "half"
FLOW = f"""
from rlflow import flow, loss, stage, token

OTHERS = {NAMES[1:]!r}

@stage(gives={{name: token for name in OTHERS}})
def make(sampled_logprobs):
    return tuple(sampled_logprobs for _ in OTHERS)

@stage(gives="values")
def step(tokens, {", ".join(NAMES)}):
    return values

@loss
def nothing(new):
    return new.logprobs, {{}}

@flow
def dispatch(prompts, actor):
    batch = actor.generate(prompts, samples=1, max_tokens=4)
    batch |= make(batch)
    batch |= step(batch)
    actor.update(batch, nothing)
"""


class System:
    """The system that makes calls to a pool, with models of the null backend.

    ``cell["flags"]``: case, workers, rows, tokens (per row), calls (per iteration), iterations.
    """

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Start the workers, and place the columns as the case requires."""
        flags = cell["flags"]
        case, workers = flags["case"], flags["workers"]
        if case not in CASES:
            raise ValueError(f"there is no case '{case}'; expected one of {', '.join(CASES)}")
        torch.set_num_threads(1)
        file = Path(folder) / "dispatch.py"
        file.write_text(FLOW)
        pools = {"moves": f"{HALF}={workers // 2},{POOL}={workers}", "returned": f"{POOL}=1"}.get(
            case, f"{POOL}={workers}"
        )
        self.roles = roles(str(file), backend="null", pools=pools, prompts=8, threads=1, actor={"pool": POOL})
        self.batch = payload(flags["rows"], flags["tokens"])
        self.call = CASES[case](self.roles, self.batch, workers)
        self.returns = exchanged(self.batch, workers) * flags["calls"] if case == "returned" else None
        self.moved()
        self.iterations = Iterations(flags, self.timed, flags["rows"] * flags["tokens"], self.moved)
        return {"iterations": flags["iterations"]}

    def timed(self) -> float:
        """Make a call and return its seconds."""
        start = time.perf_counter()
        self.call()
        return time.perf_counter() - start

    def moved(self) -> int:
        """Return the bytes of columns that were sent between processes since this method was last called."""
        return self.returns or sum(self.roles.prepared.engine.traffic().values())

    def iterate(self, count: int) -> dict[str, Any]:
        """Run the next iterations. Returns their wall seconds and the numbers of tokens in their payloads."""
        return self.iterations.next(count)

    def observe(self) -> dict[str, Any]:
        """Return an empty dict, since this system adds no measurements of its own."""
        return {}

    def close(self) -> None:
        """End the workers."""
        if hasattr(self, "roles"):
            self.roles.close()


def payload(rows: int, tokens: int) -> Batch:
    """Return a batch of the nine columns, with ``rows`` rows of ``tokens`` tokens."""
    lengths = torch.full((rows,), tokens)
    columns = {
        "tokens": Data(Kind(Level.TOKEN, "int64"), torch.ones(rows * tokens, dtype=torch.int64), lengths)
    }
    columns |= {
        name: Data(Kind(Level.TOKEN, "float32"), torch.rand(rows * tokens), lengths) for name in NAMES
    }
    return Batch(Axis.fresh(rows), columns)


def exchanged(batch: Batch, workers: int) -> int:
    """Return the number of bytes sent: all columns to the workers, and the result back."""
    split = balanced(units_of_rows(None, len(batch)), row_tokens(batch.data, len(batch)), workers)
    return sum(
        BatchFrame(part, rows, narrow=True).nbytes
        for part in (batch, batch.select("values"))
        for rows in split
    )


Call = Callable[[], Batch]


def stage_call(started: Roles, batch: Batch) -> Call:
    """Return a function that calls the stage on the pool with the columns of ``batch``."""
    engine, step = started.prepared.engine, started.plan.program.functions["step"]
    return lambda: engine.stage(step, batch, {}, 0, CallOptions(POOL))[0]  # type: ignore[arg-type]


def stays(started: Roles, batch: Batch, workers: int) -> Call:
    """Return a function that makes a call whose columns are stored on the pool."""
    return stage_call(started, started.prepared.engine.spread(batch, POOL))


def moves(started: Roles, batch: Batch, workers: int) -> Call:
    """Return a function that makes a call whose columns are stored on the smaller pool.

    The function drops copies that an earlier call fetched, so that each call fetches the columns again.
    """
    engine = started.prepared.engine
    there = engine.spread(batch, HALF)
    call, shards = stage_call(started, there), next(iter(there.data.values())).value.shards

    def first() -> Batch:
        for shard in shards:
            shard.copies.clear()
        return call()

    return first


def touched(started: Roles, batch: Batch, workers: int) -> Call:
    """Return a function that makes a call whose columns are stored on the driver."""
    return stage_call(started, batch)


def returned(started: Roles, batch: Batch, workers: int) -> Call:
    """Return a function that calls a pool of workers without models.

    The driver has the columns and gets the result.
    """

    class Echo:
        def step(self, rows: Batch) -> Batch:
            for name in rows.columns:
                rows[name]
            return rows.select("values")

    pool = make_pool("echo", Echo, workers, lambda rank: (), None, num_cpus=0)
    pool.made(STARTED).result()
    return lambda: pool.call_batch("step", batch).result()


CASES: dict[str, Callable[[Roles, Batch, int], Call]] = {
    "stays": stays,
    "moves": moves,
    "touched": touched,
    "returned": returned,
}
