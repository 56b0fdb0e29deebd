"""Differences between two graphs, and graphs that differ only in names."""

import dataclasses

import pytest

from rlflow.author.load import load_flow
from rlflow.compiler.graph.diff import diff, same_shape
from rlflow.compiler.trace.compile import compile_flow


def test_a_graph_equals_itself(ppo, repeated):
    assert diff(ppo, ppo) == diff(repeated, repeated) == []


def test_a_setting_changes_only_the_nodes_that_use_it(ppo):
    flow = load_flow("ppo")
    other = compile_flow(flow, dataclasses.replace(flow.parameters.hp, beta=0.0)).graph
    assert [str(line) for line in diff(ppo, other)] == [
        "~ setting beta: 0.05 -> 0.0",
        (
            "- reference.logprobs: (prompts.prompt_tokens, actor.generate.tokens, "
            "actor.generate.temperature) -> ref_logprobs"
        ),
        "~ charge_kl: reads ref_logprobs no longer (was reference.logprobs.ref_logprobs)",
        "~ charge_kl: setting beta: 0.05 -> 0.0",
    ]
    assert str(diff(other, ppo)[1]).startswith("+ reference.logprobs: ")


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("RANK0)", "RANK0, timeout=9)", "~ raise_bar: timeout 300.0 -> 9"),
        ('"bar": 0.25', '"bar": 0.5', "~ state holds bar: 0.25 -> 0.5"),
        ("samples=2", "samples=4", "~ repeat.body: in its body: actor.generate: setting samples: 2 -> 4"),
        (
            "def raise_bar(scores, bar, *, limit)",
            "def raise_bar(bar, *, limit, scores=0)",
            "~ raise_bar: reads scores no longer (was repeat.body.scores)",
        ),
        (
            "actor.logprobs(batch)",
            "actor.logprobs(batch, gives=('logprobs', 'entropy'))",
            "~ actor.logprobs: gives entropy (token float32)",
        ),
    ],
)
def test_each_kind_of_change_has_a_line(graph_of, repeated_text, repeated, old, new, line):
    assert old in repeated_text
    lines = [
        str(difference).replace("~ repeat.body: in its body: ~ ", "~ repeat.body: in its body: ")
        for difference in diff(repeated, graph_of(repeated_text.replace(old, new)))
    ]
    assert line in lines


def test_a_changed_function_body_is_noticed(graph_of, repeated_text, repeated):
    lines = [
        str(line) for line in diff(repeated, graph_of(repeated_text.replace("scores.mean()", "scores.sum()")))
    ]
    assert len(lines) == 1
    assert lines[0].startswith("~ raise_bar: the body changed (")


def test_renamed_roles_and_settings_keep_the_shape(graph_of, repeated_text, repeated):
    renamed = graph_of(
        repeated_text.replace("actor", "policy")
        .replace("groups: int", "count: int")
        .replace("hp.groups", "hp.count")
    )
    assert diff(repeated, renamed)
    assert same_shape(repeated, renamed)


def test_other_functions_or_wiring_change_the_shape(ppo, repeated, graph_of, repeated_text):
    assert not same_shape(ppo, repeated)
    assert not same_shape(repeated, graph_of(repeated_text.replace("scores.mean()", "scores.sum()")))


def test_swapped_parameters_change_the_shape(graph_of):
    text = """
from rlflow import flow, loss, stage

@stage(gives="advantages")
def minus(logprobs, ref_logprobs):
    return logprobs - ref_logprobs

@loss
def advantage_loss(new, advantages):
    return -new.logprobs * advantages, {}

@flow
def f(prompts, actor, reference):
    batch = actor.generate(prompts, max_tokens=4)
    batch |= actor.logprobs(batch, gives="logprobs")
    batch |= reference.values(batch, gives="ref_logprobs")
    batch |= minus(batch)
    actor.update(batch, advantage_loss)
"""
    swapped = text.replace('gives="logprobs"', 'gives="x"').replace(
        'gives="ref_logprobs"', 'gives="logprobs"'
    )
    swapped = swapped.replace('gives="x"', 'gives="ref_logprobs"')
    assert same_shape(graph_of(text), graph_of(text))
    assert not same_shape(graph_of(text), graph_of(swapped))
