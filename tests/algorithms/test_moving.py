"""Algorithms whose reference follows the policy: when and how far it moves, by hand."""

import dataclasses

import pytest

import rlflow
from rlflow.author.load import load_flow


@pytest.fixture
def steps(tmp_path):
    """A function: run iterations of an algorithm on the null backend, whose only weight is its number of steps,
    and return this weight of the actor and of the reference after each iteration.
    """

    def ran(name, iterations, **hp):
        flow = load_flow(name)
        hp = dataclasses.replace(flow.parameters.hp, **hp)
        with rlflow.roles(flow, hp, backend="null", prompts=8, out=str(tmp_path)) as roles:
            models, seen = roles.prepared.engine.models, []
            for _ in range(iterations):
                flow(roles.take(), **roles)
                states = [models[role].trainer.state() for role in ("actor", "reference")]
                seen.append(tuple(float(state["parameters/steps"]) for state in states))
            return seen

    return ran


def test_the_reference_of_tr_dpo_moves_by_alpha_every_tau_iterations(steps):
    """Each iteration is one step of the policy. The reference becomes 0.6 · 2, then 1.2 + 0.6 · (4 - 1.2)."""
    moved = steps("tr_dpo", 5, alpha=0.6, tau=2, minibatch=16)
    assert [actor for actor, _ in moved] == [1, 2, 3, 4, 5]
    assert [reference for _, reference in moved] == pytest.approx([0, 1.2, 1.2, 2.88, 2.88])


def test_a_hard_update_of_tr_dpo_copies_the_policy(steps):
    assert steps("tr_dpo", 3, alpha=1.0, tau=3, minibatch=8) == [(2, 0), (4, 0), (6, 6)]


def test_prorl_resets_its_reference(steps):
    """With two steps per iteration, and a reset after every second iteration."""
    moved = steps("prorl", 4, reset=2, samples=2, max_tokens=4, minibatch=8)
    assert moved == [(2, 0), (4, 4), (6, 4), (8, 8)]
