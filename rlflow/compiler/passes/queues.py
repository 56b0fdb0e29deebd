"""The pass ``queues``, which picks an executor queue for each node.

This depends on the kind of node and, if there are pools, on its pool.
"""

from __future__ import annotations

from dataclasses import replace

from rlflow.compiler.graph.model import Node, Op
from rlflow.compiler.placement import Placement, homes
from rlflow.compiler.plan import PassNote, Plan

QUEUES = {
    Op.GENERATE: "model",
    Op.LOGPROBS: "model",
    Op.VALUES: "model",
    Op.UPDATE: "model",
    Op.FOLLOW: "model",
    Op.REWARD: "io",
    Op.REPEAT: "control",
}
# queue of one process → nodes that it runs at once; model nodes run one at a time, because they share the
# cores
ROOM = {"model": 1, "cpu": 2, "io": 8}
KINDS = {"": "models", "cpu": "stages", "io": "rewards"}  # what runs on the queues of a pool
POOL_ROOM = {"": 1, ".cpu": 2, ".io": 4}  # the same for the queues of a pool: models, stages, rewards


def queues(plan: Plan) -> Plan:
    """Assign each node to an executor queue.

    On each pool, nodes that use a model run one at a time. Stages, rewards and transfers run alongside them.
    """
    home = homes(plan.graph, plan.placement) if plan.placement else {}
    lane = {i: _queue(plan.graph.nodes[i], home.get(i)) for i in plan.live}
    counts = {name: sum(1 for used in lane.values() if used == name) for name in sorted(set(lane.values()))}
    what = ", ".join(f"{queue_words(name)} {count}" for name, count in counts.items())
    return replace(plan, lane=lane, home=home, notes=(*plan.notes, PassNote("queues", what)))


def _queue(node: Node, pool: str | None) -> str:
    kind = QUEUES.get(node.op, "control")
    if node.op in (Op.ASK, Op.ENCODE):
        kind = "cpu"
    if node.op is Op.STAGE:
        kind = "model" if node.role else "cpu"
    if pool is None or kind == "control":
        return kind
    return pool if kind == "model" else f"{pool}.{kind}"


def queue_words(queue: str) -> str:
    """Describe what runs on a queue: `models`, or `train models` for a queue of the pool `train`."""
    if queue in ("model", "control"):
        return {"model": "models", "control": "control flow"}[queue]
    pool, _, kind = queue.partition(".")
    return KINDS[pool] if pool in KINDS else f"{pool} {KINDS[kind]}"


def room_of(placement: Placement | None) -> dict[str, int]:
    """Return how many nodes each queue can run at once. Queues without a limit aren't listed."""
    if placement is None:
        return dict(ROOM)
    return {f"{name}{kind}": places for name in placement.pools for kind, places in POOL_ROOM.items()}
