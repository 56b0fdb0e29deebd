"""Passes: from a program to a plan. Each takes a plan, returns a plan and says what it did; each is a module
of its name.

Here: which columns are kept, which lane a node gets, chunks, order, forwards that an update uses again, what
lies in memory when. Not here: the plan's own type (`rlflow.compiler.plan`), which pool a role is on
(`rlflow.compiler.placement`), running (`rlflow.execution`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlflow.compiler.graph.model import Graph
from rlflow.compiler.passes.lanes import lanes
from rlflow.compiler.passes.prune import prune, reuse
from rlflow.compiler.passes.rank import rank
from rlflow.compiler.passes.stream import stream
from rlflow.compiler.placement import Placement
from rlflow.compiler.plan import Plan, Streaming
from rlflow.compiler.trace.compile import Program

NOT_STREAMED = Streaming()
PASSES: tuple[Callable[[Plan], Plan], ...] = (prune, lanes, stream, rank, reuse)


def plan(program: Program, placement: Placement | None = None, streaming: Streaming = NOT_STREAMED) -> Plan:
    """All passes over the program's graph, over the bodies of its repeats, and over the flow's own
    evaluation; with a placement for its pools, else for one process."""
    evaluation = program.graph.evaluation
    planned = _planned(program, program.graph, placement, streaming, is_body=False)
    return (
        replace(planned, evaluation=_planned(program, evaluation, placement, NOT_STREAMED, is_body=True))
        if evaluation
        else planned
    )


def _planned(
    program: Program, graph: Graph, placement: Placement | None, streaming: Streaming, is_body: bool
) -> Plan:
    recorded = frozenset(item.column for item in graph.results) if is_body else frozenset()
    plan = Plan(
        program,
        graph,
        tuple(node.id for node in graph.nodes),
        held_to_end=recorded,
        placement=placement,
        streaming=streaming,
    )
    for run_pass in PASSES:
        plan = run_pass(plan)
    bodies = {
        node.id: _planned(program, node.body, placement, streaming, is_body=True)
        for node in graph.nodes
        if node.body
    }
    return replace(plan, bodies=bodies)
