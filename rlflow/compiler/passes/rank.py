"""The pass ``rank``, which gives each node a priority: the length of the longest path after it."""

from __future__ import annotations

import graphlib
import math
from collections.abc import Mapping
from dataclasses import replace

from rlflow.compiler.graph.model import Op
from rlflow.compiler.passes.queues import room_of
from rlflow.compiler.plan import PassNote, Plan

COST = {
    Op.GENERATE: 10.0,
    Op.REPEAT: 20.0,
    Op.UPDATE: 8.0,
    Op.REWARD: 3.0,
    Op.LOGPROBS: 2.0,
    Op.VALUES: 2.0,
    Op.STAGE: 0.2,
    Op.FOLLOW: 0.2,
    Op.ASK: 0.2,
    Op.ENCODE: 0.2,
}


def rank(
    plan: Plan, seconds: Mapping[int, float] | None = None, room: Mapping[str, int] | None = None
) -> Plan:
    """Set each unit's priority to the work that remains after it, so that units with much left start early.

    ``seconds``: live node → duration, by default a typical relative cost. ``room``: queue → how many nodes it
    can run at once.
    """
    durations = plan.shared(seconds or {i: COST.get(plan.graph.nodes[i].op, 0.0) for i in plan.live})
    after = remaining(plan, durations, room or room_of(plan.placement))
    longest = max(after, key=lambda i: after[i] + durations[i])
    return replace(
        plan,
        priority=after,
        notes=(*plan.notes, PassNote("rank", f"the longest path starts at {plan.node(longest).name}")),
    )


def remaining(plan: Plan, seconds: Mapping[int, float], room: Mapping[str, int]) -> dict[int, float]:
    """For each live node or piece, return the least seconds from its end to the end of the iteration.

    This is the longest path through the units that wait for it, where units that share a queue run one after
    another. A node's own seconds don't count: of two units that are ready for one queue, the one with more
    work after it must go first, however long it takes itself (Jackson 1955).
    """
    after: dict[int, float] = {}
    for i in reversed(list(graphlib.TopologicalSorter(plan.waits_for).static_order())):
        sharing: dict[str, list[tuple[float, float]]] = {}
        for j in plan.followers.get(i, ()):
            sharing.setdefault(plan.lane.get(j, ""), []).append((after[j], seconds[j]))
        after[i] = max(
            (_in_turn(nodes, room.get(lane, math.inf)) for lane, nodes in sharing.items()), default=0.0
        )
    return {i: after[i] for i in plan.units}


def _in_turn(nodes: list[tuple[float, float]], room: float) -> float:
    """Return the least seconds until a queue's nodes, and all work after them, are done.

    ``nodes``: (seconds of work after the node, seconds of the node). ``room``: how many the queue can run at
    once.
    """
    longest = busy = 0.0
    for after, own in sorted(nodes, reverse=True):
        busy += own / room
        longest = max(longest, max(own, busy) + after)
    return longest
