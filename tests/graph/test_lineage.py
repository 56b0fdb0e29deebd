"""How many rows a flow's axes have, at most, for so many prompts."""

import pytest

from rlflow.author.load import load_flow
from rlflow.author.settings import override
from rlflow.graph.lineage import expected_groups, expected_rows
from rlflow.trace.compile import compile_flow


def counted(name, prompts, repeats="groups", **hp):
    """(rows, groups) of what each node makes, by its name."""
    flow = load_flow(name)
    settings = override(flow.parameters.hp, {key: str(value) for key, value in hp.items()}, "hp.") if hp else None
    graph = compile_flow(flow, settings).graph
    rows = expected_rows(graph, prompts, repeats)
    return {node.name: (rows[node.makes], expected_groups(graph, node.makes, rows)) for node in graph.nodes if node.makes is not None}


def test_each_prompt_has_so_many_samples():
    assert counted("grpo", 5, samples=3)["actor.generate"] == (15, 5)


@pytest.mark.parametrize(("repeats", "groups"), [("groups", 7), ("prompts", 5)])
def test_a_repeat_keeps_the_groups_that_it_wants_or_one_for_each_prompt(repeats, groups):
    assert counted("dapo", 5, repeats, samples=2, groups=7)["repeat.sampled"] == (2 * groups, groups)
