"""The number of optimizer steps that schedules use, and the completeness of a run's parts when they are
made."""

import ast
import dataclasses

from sources import sources

from rlflow.author.load import load_flow
from rlflow.compiler.trace.compile import compile_flow
from rlflow.runs.assemble import expected_steps


def test_each_role_counts_the_steps_of_its_own_updates():
    flow = load_flow("ppo")
    hp = dataclasses.replace(flow.parameters.hp, warmup=2, epochs=3, minibatch=10, samples=1)
    graph = compile_flow(flow, hp).graph
    uses = {use.name: use for use in graph.roles}
    assert expected_steps(graph, uses["critic"], prompts=32, iterations=5) == 4 * 3 * 5
    assert expected_steps(graph, uses["actor"], prompts=32, iterations=5) == 4 * 3 * (5 - 2)


def assigned_to_engines():
    """Return the field of each assignment to a field of an engine."""
    for each in sources("rlflow"):
        for node in each.nodes:
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AugAssign)
                else []
            )
            parts = [
                part
                for whole in targets
                for part in (whole.elts if isinstance(whole, ast.Tuple) else [whole])
            ]
            for part in parts:
                if (
                    isinstance(part, ast.Attribute)
                    and isinstance(part.value, ast.Attribute)
                    and part.value.attr == "engine"
                ):
                    yield part.attr


def test_an_engine_is_complete_when_it_is_made():
    """Afterwards only the iteration and the flow's state change."""
    assert set(assigned_to_engines()) == {"flow_state", "iteration", "state"}


def test_no_call_passes_more_than_twelve_positional_arguments():
    calls = [
        (each.path.as_posix(), node.lineno)
        for each in sources("rlflow", "backends")
        for node in each.nodes
        if isinstance(node, ast.Call) and len(node.args) > 12
    ]
    assert calls == []
