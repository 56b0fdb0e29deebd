"""The roles that are evaluated on held-out prompts."""

import torch

from rlflow import ask, flow, loss, row, stage, text
from rlflow.algorithms.critique import critique
from rlflow.algorithms.debate import debate
from rlflow.algorithms.grpo import grpo
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.roles.bound import bind_roles
from rlflow.runs.api import resolve_config
from rlflow.runs.held_out import evaluation_roles, unmeasured


@stage(gives={"question": text})
def posed(completion):
    return completion


@stage(gives={"scores": row(torch.float32)})
def solvable(completion):
    return torch.tensor([float(len(said)) for said in completion])


@loss
def policy_loss(new, scores):
    return -new.logprobs * scores[:, None]


@flow
def selfplay(prompts, proposer, solver):
    """One role poses problems and the other solves them; no role answers the questions of the data."""
    problems = proposer.generate(prompts, samples=2, max_tokens=4)
    problems |= solvable(problems)
    answers = solver.generate(ask(problems | posed(problems), "question"), max_tokens=4)
    answers |= solvable(answers)
    proposer.update(problems, policy_loss)
    solver.update(answers, policy_loss)


def claimed(made, **values):
    config = resolve_config(made, None, {"held_out": 8, **values})[0]
    graph = compile_flow(made).graph
    roles = bind_roles(graph, config)
    return evaluation_roles(graph, roles, config.options), unmeasured(graph, roles, config.options)


def test_the_role_that_answers_data_questions_is_evaluated():
    assert claimed(grpo) == (("actor",), "")
    assert claimed(critique) == (("solver",), "")
    assert claimed(debate) == (("one",), "")


def test_without_a_role_that_answers_there_is_no_evaluation():
    roles, why = claimed(selfplay)
    assert roles == ()
    assert "proposer, solver sample" in why
    assert "@flow(evaluate=…)" in why
    assert claimed(selfplay, held_out=0) == ((), "")
