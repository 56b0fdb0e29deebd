"""Measure the CPU time of the scheduler for growing plans: synthetic plans in virtual time, one thread.

    python benchmarks/schedule.py [--nodes 1000 3000 10000] [--pools 16 512 4096] [--workers 4096]
                                  [--repeats 5] [--json]

A plan has five layers of nodes, which are assigned to the pools in rotation. A node reads three nodes of the
previous layer. A pool, with all its ranks, runs one node at a time. An event is the start or end of a node.
``events/s`` is the median over repeats for one scheduler, from its first event to its last. A heap of end
times drives the scheduler. ``growth`` is the time of an event divided by the time in the first row with the
same number of pools; 1 means linear growth. ``plan`` is the time of the passes `prune` and `rank` and of
building the plan's tables.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import json
import random
import statistics
import time
from dataclasses import asdict, dataclass, replace

from rich.console import Console
from rich.table import Table

from rlflow.compiler.graph.model import Column, Graph, Input, Node, Op, Output, RowAxis
from rlflow.compiler.passes.prune import prune
from rlflow.compiler.passes.rank import rank
from rlflow.compiler.plan import Plan
from rlflow.compiler.scheduler import Finish, Scheduler, StartNode

READS = 3
LAYERS = 5


@dataclass
class Row:
    """A row of the table: the measurements for one size of plan."""

    nodes: int
    pools: int
    ranks: int
    plan_seconds: float
    events: int
    events_per_second: float
    growth: float = 1.0


def layered(nodes: int, seed: int) -> Plan:
    """Return a plan with nodes 1 to ``nodes`` in layers. Node 0 provides the data."""
    rng, width = random.Random(seed), -(-nodes // LAYERS)
    made = [Node(0, Op.DATA, "data", 0, outputs=(Output("x", None, "x"),))]
    for i in range(1, nodes + 1):
        first = 1 + ((i - 1) // width - 1) * width  # first node of the previous layer
        before = {rng.randrange(first, first + width) for _ in range(READS)} if first > 0 else {0}
        inputs = tuple(Input(f"x{b}", Column(b, "x")) for b in sorted(before))
        made.append(Node(i, Op.STAGE, f"n{i}", 0, inputs, (Output("x", None, "x"), Output("y", None, "y"))))
    return Plan(None, Graph("layered", tuple(made), (RowAxis(),)), tuple(range(nodes + 1)))  # type: ignore[arg-type]


def planned(plan: Plan, room: dict[str, int]) -> tuple[Plan, float]:
    """Return (the plan with its tables, seconds for building the tables)."""
    start = time.process_time()
    names = list(room)
    plan = replace(prune(plan), lane={i: names[i % len(names)] for i in plan.live})
    plan = rank(plan, room=room)
    Scheduler(plan, room)  # builds the tables
    assert plan.followers
    assert plan.reads
    assert plan.gives
    return plan, time.process_time() - start


def drive(plan: Plan, room: dict[str, int], taken: list[float]) -> tuple[int, float]:
    """Run one iteration in virtual time.

    Returns (number of events, CPU seconds including the scheduler's creation). ``taken``: the virtual
    duration of each node.
    """
    began, events, now, over = time.process_time(), 0, 0.0, False
    ends: list[tuple[float, int]] = []
    scheduler = Scheduler(plan, room)
    instructions = scheduler.begin()
    while True:
        for instruction in instructions:
            if isinstance(instruction, StartNode):
                heapq.heappush(ends, (now + taken[instruction.node], instruction.node))
                events += 1
            over |= isinstance(instruction, Finish)
        if over:
            return events, time.process_time() - began
        now, node = heapq.heappop(ends)
        events += 1
        instructions = scheduler.done(node)


def measure(nodes: int, pools: int, ranks: int, repeats: int) -> Row:
    """Measure one size of plan."""
    room = {f"pool{i}": 1 for i in range(pools)}
    plan, seconds = planned(layered(nodes, seed=0), room)
    rng = random.Random(1)
    taken = [rng.uniform(1, 10) for _ in plan.graph.nodes]
    gc.collect()
    found = [drive(plan, room, taken) for _ in range(repeats)]
    events = found[0][0]
    assert events == 2 * (nodes + 1), "every node starts and ends"
    return Row(
        nodes, pools, ranks, seconds, events, events / statistics.median(elapsed for _, elapsed in found)
    )


def rows(given: argparse.Namespace) -> list[Row]:
    """Measure all sizes of plans, and return the rows of the table."""
    found = []
    for pools in given.pools:
        same = [measure(nodes, pools, given.workers // pools, given.repeats) for nodes in given.nodes]
        for row in same:
            row.growth = same[0].events_per_second / row.events_per_second
        found += same
    return found


def show(found: list[Row]) -> None:
    table = Table("nodes", "pools × ranks", "plan, s", "events", "events/s", "µs per event", "growth")
    for row in found:
        table.add_row(
            f"{row.nodes:,}",
            f"{row.pools:,} × {row.ranks:,}",
            f"{row.plan_seconds:.2f}",
            f"{row.events:,}",
            f"{row.events_per_second:,.0f}",
            f"{1e6 / row.events_per_second:.1f}",
            f"{row.growth:.2f}",
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[1000, 3000, 10000])
    parser.add_argument("--pools", nargs="+", type=int, default=[16, 512, 4096])
    parser.add_argument("--workers", type=int, default=4096, help="total number of ranks")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="one line of JSON per row")
    given = parser.parse_args()
    if max(given.pools) > given.workers:
        parser.error(f"--pools: found {max(given.pools)}, expected at most --workers ({given.workers})")
    found = rows(given)
    if given.json:
        print("\n".join(json.dumps(asdict(row)) for row in found))
    else:
        show(found)


if __name__ == "__main__":
    main()
