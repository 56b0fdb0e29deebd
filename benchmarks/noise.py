"""Record the times of repeated equal work, as input for tests of the statistics in `rlflow.benchmarks`.

    python benchmarks/noise.py tests/benchmarks/noise.json [--blocks 200] [--iterations 3] [--prompts 2]

The work is an iteration of `grpo` on the packaged model. The backends null and local alternate block by block
in one process. Two blocks of a backend differ only by the noise of the machine and by the sampled responses.
The file also records the settings, the machine and its load.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from pathlib import Path

from rlflow.author.load import load_flow
from rlflow.config.flags import flat
from rlflow.runs.api import resolve_config
from rlflow.runs.context import RunContext
from rlflow.runs.prepare import prepare

BACKENDS = ("null", "local")
CLOCKS = ("wall", "processor")


def prepared(backend: str, prompts: int) -> RunContext:
    """Prepare a run of grpo, so that iterations can be timed without recording, evaluating and saving."""
    loaded = load_flow("grpo")
    config, hp = resolve_config(
        loaded,
        None,
        flat({"backend": backend, "prompts": prompts, "held_out": 0, "iterations": 1, "threads": 1}),
    )
    return prepare(loaded, hp, config)


def block(run: RunContext, iterations: int) -> tuple[float, float]:
    """Run one block of iterations on the same prompts.

    Returns (wall seconds, CPU seconds) per iteration.
    """
    rows = run.prompts.take(run.options.prompts)
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(iterations):
        run.executor.run(run.plan, rows)
    return (time.perf_counter() - wall) / iterations, (time.process_time() - processor) / iterations


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=2)
    options = parser.parse_args()
    runs = {backend: prepared(backend, options.prompts) for backend in BACKENDS}
    seconds: dict[str, list[float]] = {f"{backend} {clock}": [] for backend in BACKENDS for clock in CLOCKS}
    load = os.getloadavg()
    for number in range(options.blocks + 2):
        for backend in BACKENDS if number % 2 else reversed(BACKENDS):
            spent = block(runs[backend], options.iterations)
            if number >= 2:  # the first two rounds warm up
                for clock, value in zip(CLOCKS, spent, strict=True):
                    seconds[f"{backend} {clock}"].append(round(value, 5))
    for run in runs.values():
        run.close()
    settings = {
        "flow": "grpo",
        "model": "packaged",
        "blocks": options.blocks,
        "iterations per block": options.iterations,
        "prompts": options.prompts,
        "threads": 1,
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load at the start and at the end": [round(load[0], 1), round(os.getloadavg()[0], 1)],
    }
    options.file.write_text(
        json.dumps({"settings": settings, "seconds": seconds}, separators=(",", ":")) + "\n"
    )


if __name__ == "__main__":
    main()
