"""The passes that turn a program into a plan.

Each pass takes a plan and returns a changed one, with a note on what changed. Passes decide which columns are
kept, which executor queue each node goes to, chunks, the order, which forward passes an update reuses, and
when each part of a model is in memory. Each has a module of the same name. The type of a plan is in
`rlflow.compiler.plan`, and `rlflow.compiler.placement` places roles on pools.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlflow.compiler.graph.due import Narrowed, due_sets, narrowed, schedules
from rlflow.compiler.graph.model import Op
from rlflow.compiler.passes.prune import prune, reuse
from rlflow.compiler.passes.queues import queues
from rlflow.compiler.passes.rank import rank
from rlflow.compiler.passes.stream import stream
from rlflow.compiler.placement import Placement
from rlflow.compiler.plan import Plan, Streaming
from rlflow.compiler.trace.compile import Program

NOT_STREAMED = Streaming()
PASSES: tuple[Callable[[Plan], Plan], ...] = (prune, queues, stream, rank, reuse)


def plan(program: Program, placement: Placement | None = None, streaming: Streaming = NOT_STREAMED) -> Plan:
    """Plan a program, including its repeats and the flow's own evaluation.

    The plan is for the pools of ``placement``, or for a single process if that is None. If some calls aren't
    due in every iteration, each set of calls that are due together gets a plan of its own. Raises PlanError
    if there are too many sets.
    """
    evaluation = program.graph.evaluation
    planned = _planned(program, Narrowed(program.graph), placement, streaming, is_body=False)
    sets = due_sets(program.graph)
    variants = {
        each.idle: _planned(program, narrowed(program.graph, each.idle), placement, streaming, is_body=False)
        for each in sets
        if each.idle
    }
    planned = replace(planned, schedules=schedules(program.graph), due_sets=sets, variants=variants)
    return (
        replace(
            planned,
            evaluation=_planned(program, Narrowed(evaluation), placement, NOT_STREAMED, is_body=True),
        )
        if evaluation
        else planned
    )


def _planned(
    program: Program, part: Narrowed, placement: Placement | None, streaming: Streaming, is_body: bool
) -> Plan:
    graph = part.graph
    recorded = frozenset(item.column for item in graph.results) if is_body else frozenset()
    plan = Plan(
        program,
        graph,
        tuple(node.id for node in graph.nodes if node.op is not Op.IDLE),
        keep_until_end=recorded,
        placement=placement,
        streaming=streaming,
        idle=part.idle,
    )
    for run_pass in PASSES:
        plan = run_pass(plan)
    bodies = {
        node.id: _planned(
            program, part.bodies.get(node.id, Narrowed(node.body)), placement, streaming, is_body=True
        )
        for node in graph.nodes
        if node.body
    }
    return replace(plan, bodies=bodies)
