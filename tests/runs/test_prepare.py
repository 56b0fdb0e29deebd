"""How many optimizer steps a run takes, by which schedules end."""

import dataclasses

from rlflow.author.load import load_flow
from rlflow.compiler.trace.compile import compile_flow
from rlflow.runs.prepare import expected_steps


def test_each_role_has_the_steps_of_its_own_updates():
    flow = load_flow("ppo")
    hp = dataclasses.replace(flow.parameters.hp, warmup=2, epochs=3, minibatch=10, samples=1)
    graph = compile_flow(flow, hp).graph
    uses = {use.name: use for use in graph.roles}
    assert expected_steps(graph, uses["critic"], prompts=32, iterations=5) == 4 * 3 * 5
    assert expected_steps(graph, uses["actor"], prompts=32, iterations=5) == 4 * 3 * (5 - 2)
