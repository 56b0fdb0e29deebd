"""Settings of PPO: dual clip, warm-up of the critic, and a KL coefficient that follows a target."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import rlflow
import rlflow.data.tasks
from rlflow.algorithms import dapo, ppo, ppo_adaptive
from rlflow.author.load import load_flow


@pytest.fixture
def roles_of(tmp_path):
    data, made = tmp_path / "sums.jsonl", []
    data.write_text(
        "".join(json.dumps({"prompt": f"{a} + 11 =", "answer": str(a + 11)}) + "\n" for a in range(10, 40))
    )
    model = str(Path(next(iter(rlflow.data.tasks.__path__)), "arithmetic_model"))

    def roles_of(name, **settings):
        hp = dataclasses.replace(load_flow(name).parameters.hp, max_tokens=4, minibatch=4, **settings)
        made.append(
            rlflow.roles(name, hp, model=model, data=str(data), prompts=8, lr=1e-3, out=str(tmp_path))
        )
        return made[-1]

    yield roles_of
    for roles in made:
        roles.close()


def weights(roles, role):
    return {name: tensor.clone() for name, tensor in roles.prepared.engine.models[role].trainer.weights()}


def moved(before, after):
    return any(not torch.equal(before[name], after[name]) for name in before)


def test_only_the_critic_learns_during_its_warm_up(roles_of):
    roles, steps = roles_of("ppo", warmup=2), []
    for _ in range(3):
        before = {role: weights(roles, role) for role in ("actor", "critic")}
        load_flow("ppo")(roles.take(), **roles)
        steps.append([moved(before[role], weights(roles, role)) for role in ("actor", "critic")])
    assert steps == [[False, True], [False, True], [True, True]]


@pytest.mark.parametrize(("dual", "expected"), [(None, [5.0, 2.0, -1.2]), (3.0, [3.0, 2.0, -1.2])])
def test_the_dual_clip_bounds_the_loss_of_a_negative_advantage(dual, expected):
    new = SimpleNamespace(logprobs=torch.tensor([5.0, 2.0, 5.0]).log())
    value, _ = ppo.policy_loss(
        new, torch.zeros(3), torch.tensor([-1.0, -1.0, 1.0]), torch.ones(3), clip=0.2, dual=dual
    )
    torch.testing.assert_close(value, torch.tensor(expected))


BOUNDED = [
    (ppo.policy_loss, {"clip": 0.2, "high": 0.28, "dual": 3.0}),
    (dapo.policy_loss, {"low": 0.2, "high": 0.28, "dual": 3.0}),
]


@pytest.mark.parametrize(("loss", "settings"), BOUNDED, ids=["ppo", "dapo"])
def test_asymmetric_bounds_work_with_the_dual_clip(loss, settings):
    """By hand: each ratio with an advantage of 1, then of -1. Within all bounds the gradient is the ratio,
    else 0.
    """
    logprobs = torch.tensor([0.5, 0.9, 1.25, 1.3, 5.0], dtype=torch.float64).log().requires_grad_()
    clipped = [True, False, False, True, True]
    for advantage, expected, free in (
        (1.0, [-0.5, -0.9, -1.25, -1.28, -1.28], [True, True, True, False, False]),
        (-1.0, [0.8, 0.9, 1.25, 1.3, 3.0], [False, True, True, True, False]),
    ):
        ones = torch.ones(5, dtype=torch.float64)
        value, metrics = loss(
            SimpleNamespace(logprobs=logprobs), 0 * ones, advantage * ones, ones, **settings
        )
        torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64))
        (slope,) = torch.autograd.grad(value.sum(), logprobs)
        torch.testing.assert_close(slope, -advantage * logprobs.detach().exp() * torch.tensor(free))
        assert metrics["clipped"].tolist() == clipped


@pytest.mark.parametrize("delta", [0.3, 2.0])
def test_the_value_loss_is_linear_and_takes_the_worse_value(delta):
    draw = torch.Generator().manual_seed(0)
    now, values, returns = (torch.randn(40, dtype=torch.float64, generator=draw) for _ in range(3))
    now.requires_grad_()
    value, _ = ppo.value_loss(SimpleNamespace(values=now), values, returns, clip=0.5, huber=delta)
    near = torch.min(torch.max(now, values - 0.5), values + 0.5)
    peers = [
        torch.nn.functional.huber_loss(one, returns, reduction="none", delta=delta) for one in (now, near)
    ]
    torch.testing.assert_close(value, torch.max(*peers))
    got, want = (torch.autograd.grad(loss.sum(), now)[0] for loss in (value, torch.max(*peers)))
    torch.testing.assert_close(got, want)
    square, _ = ppo.value_loss(SimpleNamespace(values=now), values, returns, clip=0.5)
    torch.testing.assert_close(
        square, ppo.value_loss(SimpleNamespace(values=now), values, returns, clip=0.5, huber=1e9)[0]
    )


@pytest.mark.parametrize(("target", "expected"), [(4.0, 0.102), (9.0, 0.1), (10.0, 0.099), (100.0, 0.098)])
def test_the_kl_coefficient_moves_towards_its_target(target, expected):
    ref_logprobs, mask = (
        torch.tensor([[-7.0, -8.0], [-9.0, torch.nan]]),
        torch.tensor([[True, True], [True, False]]),
    )
    after, metrics = ppo_adaptive.adapt(
        torch.tensor(0.1), ref_logprobs + 6, ref_logprobs, mask, target=target, horizon=20
    )
    assert float(metrics["kl"]) == pytest.approx(9.0)  # responses of 12 and 6 nats
    assert float(after) == pytest.approx(expected)


def test_the_kl_coefficient_is_state_for_the_next_iteration(roles_of):
    roles, betas = roles_of("ppo_adaptive", horizon=16, target_kl=0.1), []
    for _ in range(2):
        betas.append(roles.state["beta"])
        load_flow("ppo_adaptive")(roles.take(), **roles)
    betas.append(roles.state["beta"])
    assert betas[0] == 0.05
    assert betas[1] == pytest.approx(0.05 * 0.9)  # no KL yet: half of a horizon's fifth
    assert betas[2] != betas[1]
