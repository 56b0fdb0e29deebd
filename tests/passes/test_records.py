"""What samples and health metrics show: the last columns of an iteration, and of several trained roles the rows of each."""

from pathlib import Path

import pytest

from rlflow.author.load import load, load_flow
from rlflow.graph.model import Column
from rlflow.passes import plan
from rlflow.passes.records import last, of_policies
from rlflow.trace.compile import compile_flow

LINEAGE = load(Path(__file__).parents[1] / "execution" / "lineage.py")


def makers(graph, columns):
    """The node of each column, by the column's name."""
    assert all(column.name == name for name, column in columns.items())
    return {name: graph.nodes[column.node].name for name, column in columns.items()}


@pytest.mark.parametrize("name", ["grpo", "ppo", "distill", "reward_model"])
def test_with_one_policy_nothing_is_measured_by_role(name):
    assert of_policies(compile_flow(load_flow(name)).graph) == {}


def test_each_of_several_policies_has_the_columns_of_the_rows_that_it_learns_from():
    program = compile_flow(LINEAGE.critique)
    own = {role: makers(program.graph, columns) for role, columns in of_policies(program.graph).items()}
    assert own == {
        "solver": {"tokens": "solver.generate", "mask": "solver.generate", "finish": "solver.generate", "scores": "reward",
                   "sampled_logprobs": "solver.generate", "logprobs": "solver.logprobs"},
        "verifier": {"tokens": "verifier.generate", "mask": "verifier.generate", "finish": "verifier.generate", "scores": "reward#2",
                     "sampled_logprobs": "verifier.generate", "logprobs": "verifier.logprobs"},
    }
    assert makers(program.graph, last(program.graph))["logprobs"] == "verifier.logprobs"


def test_what_is_measured_by_role_is_held_to_the_end_of_an_iteration():
    program = compile_flow(LINEAGE.critique)
    made = plan(program)
    (solver,) = (node.id for node in program.graph.nodes if node.name == "solver.generate")
    assert {Column(solver, name) for name in ("tokens", "mask", "finish", "sampled_logprobs")} <= made.held_to_end
    assert made.policies == of_policies(program.graph)
    assert made.records == last(program.graph)
