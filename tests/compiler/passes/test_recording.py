"""Columns recorded for samples and health metrics: the last columns of an iteration, and the rows of each
trained role.
"""

import pytest
import torch
from sources import TESTS

from rlflow import compare, flow, loss, row, stage
from rlflow.algorithms.debate import debate
from rlflow.algorithms.gdpo import gdpo
from rlflow.algorithms.grpo import grpo
from rlflow.author.load import load, load_flow
from rlflow.compiler.graph.model import Column
from rlflow.compiler.passes import plan
from rlflow.compiler.passes.recording import last, of_policies, scored_columns
from rlflow.compiler.trace.compile import TraceOptions, compile_flow, trace

LINEAGE = load(TESTS / "execution" / "lineage.py")


def makers(graph, columns):
    """Return the node of each column, by the column's name."""
    assert all(column.name == name for name, column in columns.items())
    return {name: graph.nodes[column.node].name for name, column in columns.items()}


@pytest.mark.parametrize("name", ["grpo", "ppo", "distill", "reward_model"])
def test_with_one_policy_metrics_are_not_split_by_role(name):
    assert of_policies(compile_flow(load_flow(name)).graph) == {}


def test_each_policy_records_the_columns_of_its_training_rows():
    program = compile_flow(LINEAGE.critique)
    own = {role: makers(program.graph, columns) for role, columns in of_policies(program.graph).items()}
    assert own == {
        "solver": {
            "tokens": "solver.generate",
            "mask": "solver.generate",
            "finish": "solver.generate",
            "scores": "reward",
            "sampled_logprobs": "solver.generate",
            "logprobs": "solver.logprobs",
        },
        "verifier": {
            "tokens": "verifier.generate",
            "mask": "verifier.generate",
            "finish": "verifier.generate",
            "scores": "reward#2",
            "sampled_logprobs": "verifier.generate",
            "logprobs": "verifier.logprobs",
        },
    }
    assert makers(program.graph, last(program.graph))["logprobs"] == "verifier.logprobs"


def test_samples_are_shown_and_not_the_texts_encoded_after_them():
    graph = compile_flow(LINEAGE.taught).graph
    own = {name: graph.nodes[column.node].name for name, column in last(graph).items()}
    assert {own[name] for name in ("tokens", "mask", "completion", "finish")} == {"actor.generate"}


def test_rows_joined_with_encoded_ones_record_which_tokens_were_sampled():
    made = plan(compile_flow(LINEAGE.demonstrated))
    (joined,) = (node.id for node in made.graph.nodes if node.name == "concat")
    assert made.records["policy_version"] == Column(joined, "policy_version")
    assert made.records["policy_version"] in made.keep_until_end
    assert "policy_version" not in plan(compile_flow(LINEAGE.correction)).records
    assert "policy_version" not in plan(compile_flow(LINEAGE.taught)).records


def test_columns_measured_by_role_are_kept_to_the_end():
    program = compile_flow(LINEAGE.critique)
    made = plan(program)
    (solver,) = (node.id for node in program.graph.nodes if node.name == "solver.generate")
    assert {
        Column(solver, name) for name in ("tokens", "mask", "finish", "sampled_logprobs")
    } <= made.keep_until_end
    assert made.policies == of_policies(program.graph)
    assert made.records == last(program.graph)


@stage(gives={"scores": row(torch.float32)})
def both(of_one, of_other):
    return of_one + of_other


@loss
def policy_loss(new, advantages):
    return -new.logprobs * advantages


@flow
def summed(prompts, actor, one, other):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= one(batch, gives="of_one")
    batch |= other(batch, gives="of_other")
    batch |= both(batch)
    batch |= compare(batch)
    actor.update(batch, policy_loss)


def names(graph, columns):
    """Return ``node.column`` for each column."""
    return [f"{graph.nodes[column.node].name}.{column.name}" for column in columns]


def test_each_of_several_learned_rewards_is_measured():
    graph = trace(gdpo, None, TraceOptions(rewards=2)).program.graph
    found = scored_columns(graph, ())[""]
    assert {role: names(graph, [column]) for role, column in found.rewards.items()} == {
        "rewards_0": ["rewards_0.scores"],
        "rewards_1": ["rewards_1.scores"],
    }
    assert names(graph, found.learned) == ["over_the_batch.advantages"]


def test_one_reward_or_one_combined_score_is_measured_as_scores():
    for made, learned in ((grpo, "compare.advantages"), (summed, "compare.advantages")):
        graph = compile_flow(made).graph
        found = scored_columns(graph, ())[""]
        assert (found.rewards, names(graph, found.learned)) == ({}, [learned])


def test_each_trained_role_records_the_inputs_of_its_update():
    graph = compile_flow(debate).graph
    found = scored_columns(graph, ("one", "other"))
    assert set(found) == {"one", "other"}
    assert all(names(graph, columns.learned) for columns in found.values())
