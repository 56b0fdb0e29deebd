"""Shipped plans on pools, and the shortest possible schedule."""

import math
from dataclasses import replace
from functools import cache

import pytest

from rlflow.author.load import load_flow
from rlflow.compiler.graph.model import Op
from rlflow.compiler.passes import plan
from rlflow.compiler.passes.rank import remaining
from rlflow.compiler.simulate import durations
from rlflow.compiler.trace.compile import compile_flow

ROOM = {
    "all": 1,
    "train": 1,
    "rollout": 1,
    "actor": 1,
    "others": 1,
    "actor's": 1,
    "critic's": 1,
    "reference's": 1,
    "io": 8,
    "cpu": 2,
}
POOLS = {
    "one pool": lambda node: "all",
    "rollout beside train": lambda node: "rollout" if node.op is Op.GENERATE else "train",
    "actor beside others": lambda node: "actor" if node.role == "actor" else "others",
    "a pool for each role": lambda node: f"{node.role}'s",
}
MODEL = (Op.GENERATE, Op.LOGPROBS, Op.VALUES, Op.UPDATE)


def lane(node, placement):
    """Return the queue of a node: its pool for a model and for a `repeat` that samples, ``io`` for a reward,
    ``cpu`` for own stages.
    """
    if node.body:
        return next(lane(inner, placement) for inner in node.body.nodes if inner.op in MODEL)
    if node.op in MODEL or (node.op is Op.STAGE and node.role):
        return POOLS[placement](node)
    return {Op.REWARD: "io", Op.STAGE: "cpu"}.get(node.op, "control")


@pytest.fixture(scope="session")
def room():
    return ROOM


@pytest.fixture(scope="session")
def placed():
    """Return the plan of a shipped algorithm on named pools."""

    @cache
    def planned(algorithm):
        return plan(compile_flow(load_flow(algorithm)))

    def placed(algorithm, placement):
        made = planned(algorithm)
        return replace(made, lane={i: lane(made.graph.nodes[i], placement) for i in made.live})

    return placed


class Shortest:
    """Branch and bound over the active schedules (Giffler and Thompson 1960). Of all ready nodes, find the
    one that can end first. Some node of its queue starts before that end; the search branches over these
    nodes.
    """

    def __init__(self, plan, seconds, room, limit):
        self.plan, self.room, self.left = plan, room, limit
        self.seconds = durations(plan, seconds)
        self.after = remaining(plan, self.seconds, room)
        self.best = math.inf

    def search(self, ends, free):
        self.left -= 1
        assert self.left >= 0, "too large for an exact search"
        starts = {
            i: self.start(i, ends, free)
            for i in self.plan.live
            if i not in ends and self.plan.waits_for[i] <= ends.keys()
        }
        if not starts:
            self.best = min(self.best, max(ends.values()))
        elif max(starts[i] + self.seconds[i] + self.after[i] for i in starts) < self.best - 1e-9:
            for i in self.choices(starts):
                end, lane = starts[i] + self.seconds[i], self.plan.lane[i]
                self.search(
                    ends | {i: end}, free | ({lane: sorted([end, *free[lane][1:]])} if lane in free else {})
                )

    def start(self, i, ends, free):
        """Return the earliest start in the first free slot of the queue, after all inputs of the node."""
        return max([*(ends[j] for j in self.plan.waits_for[i]), free.get(self.plan.lane[i], [0.0])[0]])

    def choices(self, starts):
        first = min(starts, key=lambda i: starts[i] + self.seconds[i])
        end, lane = starts[first] + self.seconds[first], self.plan.lane[first]
        if lane not in self.room or not self.seconds[first]:
            return [first]
        rivals = [i for i in starts if self.plan.lane[i] == lane and starts[i] < end]
        return sorted(rivals, key=lambda i: -self.after[i])


@pytest.fixture(scope="session")
def optimum():
    """Return the exact minimal makespan of a small plan."""

    def optimum(plan, seconds, room, limit=100_000):
        shortest = Shortest(plan, seconds, room, limit)
        shortest.search({}, {lane: [0.0] * places for lane, places in room.items()})
        return shortest.best

    return optimum
