"""Measure the CPU time of idle workers and of the waiting driver during a run.

    python benchmarks/idle.py [--ranks 2] [--seconds 20]

The run uses the null backend. One pool trains and the other samples, one after the other. Sampling and
updates take --seconds without computing. Processor times come from /proc (Linux).
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from typing import Any

import ray

import rlflow

EDGE = 2.0  # seconds at the start and at the end of a call that are not measured
TICKS = os.sysconf("SC_CLK_TCK")


def used(pid: int) -> float:
    """Return the CPU seconds that a process has used so far, in all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def pids(engine: Any) -> dict[str, int]:
    """Return the process ids of all ranks and of the driver, by name."""
    requested = {
        str(pool.at(rank)): actor.present.options(concurrency_group="control").remote()
        for pool in engine.pools.values()
        for rank, actor in enumerate(pool.actors)
    }
    return {at: ray.get(ref).process.pid for at, ref in requested.items()} | {"driver": os.getpid()}


def measured(found: dict[str, int], seconds: float) -> dict[str, float]:
    """Return the share of a core that each process uses, measured over ``seconds``.

    ``found``: the process ids by name.
    """
    before, start = {at: used(pid) for at, pid in found.items()}, time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - start
    return {at: (used(pid) - before[at]) / passed for at, pid in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    pools = f"train={given.ranks},rollout={given.ranks}"
    roles = rlflow.roles(
        "grpo",
        backend="null",
        prompts=8,
        pools=pools,
        threads=1,
        generate_seconds=given.seconds,
        update_seconds=given.seconds,
        **{"hp.samples": 2, "hp.max_tokens": 8},
    )
    try:
        prepared = roles.prepared
        found = pids(prepared.engine)
        window = given.seconds - 2 * EDGE
        run = threading.Thread(target=prepared.executor.run, args=(prepared.plan, roles.take()))
        run.start()
        for busy in ("rollout samples", "train updates"):
            time.sleep(EDGE)
            shares = measured(found, window)
            print(
                f"while {busy}, over {window:g} s: "
                + ", ".join(f"{at} {share:.1%}" for at, share in shares.items())
            )
            time.sleep(EDGE)
        run.join()
    finally:
        roles.close()


if __name__ == "__main__":
    main()
