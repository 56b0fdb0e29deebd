"""Upper bounds on the rows of a flow's axes for a given number of prompts."""

import pytest
from sources import TESTS

from rlflow.author.load import load_flow
from rlflow.author.settings import override
from rlflow.compiler.graph.ancestry import (
    Merge,
    ahead_of_training,
    common_prompts,
    expected_groups,
    expected_rows,
    merge,
    origins,
    sources,
)
from rlflow.compiler.graph.model import RowAxis
from rlflow.compiler.trace.compile import compile_flow


def counted(name, prompts, repeats="groups", **hp):
    """Return (rows, groups) of each node's output, by node name."""
    flow = load_flow(name)
    settings = (
        override(flow.parameters.hp, {key: str(value) for key, value in hp.items()}, "hp.") if hp else None
    )
    graph = compile_flow(flow, settings).graph
    rows = expected_rows(graph, prompts, repeats)
    return {
        node.name: (rows[node.makes], expected_groups(graph, node.makes, rows))
        for node in graph.nodes
        if node.makes is not None
    }


def test_each_prompt_has_the_requested_number_of_samples():
    assert counted("grpo", 5, samples=3)["actor.generate"] == (15, 5)


@pytest.mark.parametrize(("repeats", "groups"), [("groups", 7), ("prompts", 5)])
def test_a_repeat_keeps_its_groups_or_one_per_prompt(repeats, groups):
    assert counted("dapo", 5, repeats, samples=2, groups=7)["repeat.sampled"] == (2 * groups, groups)


def test_groups_by_prompt_are_at_most_one_per_prompt():
    found = counted(str(TESTS / "execution" / "lineage.py::demonstrated"), 5)
    assert found["encode"] == (5, 5)
    assert found["encode#2"] == (15, 5)
    assert found["concat"] == (5 + 15 + 15, 5)
    assert found["choose#2"] == (15, 5)


# prompts, 4 samples each, 3 more each, some of the first samples, one sample for each of these, both kinds of
# samples one after another; beginnings of the first samples, with one and with two samples for each
AXES = [
    RowAxis(),
    RowAxis(0, 4, True),
    RowAxis(0, 3, True),
    RowAxis(1, step="chosen"),
    RowAxis(3, 1),
    RowAxis(step="joined", parts=(3, 2)),
    RowAxis(1, step="cut"),
    RowAxis(6, 1),
    RowAxis(6, 2),
    RowAxis(0, 0, True, "joined", (1, 2)),  # both kinds of samples in groups by prompt
    RowAxis(1, 0, True, "encoded"),
]


def test_chosen_and_joined_rows_descend_from_their_sources():
    found = [sources(AXES, axis) for axis in range(len(AXES))]
    assert found == [{0}, {1}, {2}, {1, 3}, {4}, {1, 2, 3, 5}, {6}, {7}, {8}, {1, 2, 9}, {10}]


@pytest.mark.parametrize(
    ("parts", "prompts"), [((1, 2), 0), ((3, 10), 0), ((7, 8), 6), ((8, 1), 0), ((9, 10), 0), ((5, 1), None)]
)
def test_groups_by_prompt_are_of_the_nearest_prompts_of_all_parts(parts, prompts):
    assert common_prompts(AXES, parts) == prompts


def test_the_origins_of_joined_rows_include_those_of_their_parts():
    assert origins(AXES, 5) == {0, 1, 2, 3, 5}
    assert origins(AXES, 10) == {0, 1, 10}


@pytest.mark.parametrize(
    ("axis", "other", "by_group", "how"),
    [
        (1, 1, False, Merge.WHOLE),
        (1, 0, False, Merge.EACH),  # a prompt's value for each of its samples
        (3, 1, False, Merge.WHOLE),
        (4, 1, False, Merge.EACH),
        (0, 1, False, Merge.NEVER),  # four values a prompt
        (0, 1, True, Merge.EACH),
        (3, 4, False, Merge.EACH),
        (1, 3, False, Merge.SOME),
        (1, 4, False, Merge.SOME),
        (0, 4, True, Merge.NEVER),
        (1, 5, False, Merge.NEVER),
        (5, 1, False, Merge.NEVER),
        (1, 7, False, Merge.TOKENS),
        (3, 7, False, Merge.TOKENS),
        (4, 7, False, Merge.NEVER),  # the samples of chosen rows have tokens of their own
        (1, 8, False, Merge.NEVER),  # two values a token
        (0, 7, False, Merge.NEVER),
        (9, 0, False, Merge.EACH),  # a prompt's value for each row of its group
        (0, 9, True, Merge.SOME),  # a group's value for its prompt, if the prompt has rows
        (0, 9, False, Merge.NEVER),
        (9, 1, False, Merge.NEVER),  # four values for each row of the group
        (9, 1, True, Merge.EACH),
        (1, 10, False, Merge.SOME),  # rows without a text have no value
        (10, 1, False, Merge.EACH),
        (0, 10, True, Merge.SOME),
    ],
)
def test_rows_merge_by_their_common_ancestor(axis, other, by_group, how):
    assert merge(AXES, axis, other, by_group) is how


@pytest.mark.parametrize(
    ("name", "ahead"),
    [
        ("grpo", ["actor.generate"]),
        ("dapo", ["repeat.sampled"]),
        ("correction", ["actor.generate", "look_again", "ask", "actor.generate#2"]),
    ],
)
def test_sampling_and_its_inputs_run_ahead_of_training(name, ahead):
    graph = compile_flow(load_flow(name)).graph
    assert [node.name for node in graph.nodes if node.id in ahead_of_training(graph)] == ahead
