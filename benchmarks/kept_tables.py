"""Measure what a table that a flow keeps costs in an iteration of the packaged GRPO.

    python benchmarks/kept_tables.py [--keys 100000] [--columns 8] [--iterations 1000] [--timed 5]

Each iteration reads the table for its prompts, writes all columns for its rows, and makes the table's saved form, as
if each iteration had a checkpoint. Half of the keys were written before, and the keys of prompts are random. Prints
processor milliseconds, and the bytes by which a checkpoint of every iteration would grow.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Kind, Level
from rlflow.author.load import load_flow
from rlflow.author.memory import REDUCERS, Reducer, table
from rlflow.data.prompts import AHEAD, by_weight
from rlflow.execution.engine import Engine
from rlflow.execution.memory.saved import saved
from rlflow.execution.memory.tables import KeptTable
from rlflow.runs.api import resolve_config
from rlflow.runs.context import RunContext
from rlflow.runs.prepare import prepare

NAME = "seen"
DRAW = "draw prompts by weight"
RULES = (REDUCERS["add"], Reducer("ema", 0.95), REDUCERS["max"], REDUCERS["last"])


def iteration_milliseconds(run: RunContext, repeats: int) -> float:
    """Return the median processor time of an iteration of a run, after one that warms up."""
    times = []
    for number in range(repeats + 1):
        run.engine.iteration, start = number, time.process_time()
        run.executor.run(run.plan, run.engine.take(run.options.prompts))
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times[1:])


class Kept:
    """A table in which half of the keys were written once, and the calls on it in each iteration."""

    def __init__(self, engine: Engine, keys: int, columns: int, prompts: int, samples: int) -> None:
        self.engine, self.keys, self.prompts, self.samples = engine, keys, prompts, samples
        self.reducers = {f"number{i}": RULES[i % len(RULES)] for i in range(columns)}
        self.chance = torch.Generator().manual_seed(0)
        self.milliseconds: dict[str, list[float]] = {}
        kept = KeptTable(table(**dict.fromkeys(self.reducers, 0.0)))
        engine.memory = {NAME: kept}
        engine.iteration = 0
        engine.keep({}, {NAME: engine.write(NAME, self.rows(torch.arange(0, keys, 2)), self.reducers)[0]})
        self.files = set(saved(engine.memory, engine)[1])
        self.grown: list[int] = []

    def rows(self, keys: Tensor) -> Batch:
        """Return rows with these keys and random numbers."""
        numbers = torch.randn(len(self.reducers), len(keys), generator=self.chance)
        data = {
            name: Data(Kind(Level.ROW, "float32"), own)
            for name, own in zip(self.reducers, numbers, strict=True)
        }
        return Batch(Axis.fresh(len(keys)), {"key": Data(Kind(Level.ROW, "int64"), keys)} | data)

    def iterate(self, number: int) -> None:
        """Make the calls of an iteration, and note their times and the bytes of new files."""
        self.engine.iteration = number
        keys = torch.randint(self.keys, (self.prompts,), generator=self.chance)
        prompts, rows = self.rows(keys), self.rows(keys.repeat_interleave(self.samples))
        self._timed("read", lambda: self.engine.read(NAME, prompts))
        after = self._timed("write", lambda: self.engine.write(NAME, rows, self.reducers)[0])
        self.engine.keep({}, {NAME: after})
        _, files = self._timed("saved form", lambda: saved(self.engine.memory, self.engine))
        self.grown.append(sum(len(data) for name, data in files.items() if name not in self.files))
        self.files = set(files)
        self._timed(DRAW, lambda: self.draw(number))

    def draw(self, number: int) -> None:
        """Draw an iteration's prompts from all keys by a number of the table, as ``--prompts-by`` does."""
        numbers = self.engine.memory[NAME].read(torch.arange(self.keys))["number2"]
        by_weight(numbers.double().numpy(), 0, number, AHEAD * self.prompts)

    def _timed(self, what: str, call: Callable[[], Any]) -> Any:
        start = time.thread_time()
        result = call()
        self.milliseconds.setdefault(what, []).append(1e3 * (time.thread_time() - start))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("keys", 100_000), ("columns", 8), ("iterations", 1000), ("timed", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    flow = load_flow("grpo")
    config, hp = resolve_config(flow, None, {"threads": 1})
    run = prepare(flow, hp, config)
    try:
        whole = iteration_milliseconds(run, options.timed)
        prompts, samples = run.options.prompts, run.plan.program.hp.samples
        kept = Kept(run.engine, options.keys, options.columns, prompts, samples)
        for number in range(1, options.iterations + 1):
            kept.iterate(number)
    finally:
        run.close()
    means = {what: statistics.mean(times) for what, times in kept.milliseconds.items()}
    drawing = means.pop(DRAW)
    cost = sum(means.values())
    print(f"an iteration of grpo ({prompts} prompts, {samples} samples): {whole:.0f} ms")
    print(
        f"a table of {options.keys} keys and {options.columns} columns, mean of {options.iterations} iterations:"
    )
    for what, mean in means.items():
        print(f"  {what:<11} {mean:7.3f} ms (at most {max(kept.milliseconds[what]):.1f})")
    print(f"  in all      {cost:7.3f} ms, {cost / whole:.2%} of an iteration")
    print(f"  {DRAW} from all records: {drawing:.3f} ms, {drawing / whole:.2%} of an iteration")
    size, changed = sum(kept.grown) / len(kept.grown), prompts * (8 + 4 * options.columns)
    print(
        f"a checkpoint in each iteration grows by {size:.0f} bytes; {prompts} keys and numbers have {changed}"
    )
    print(f"files of the table: {len(kept.files)}")


if __name__ == "__main__":
    main()
