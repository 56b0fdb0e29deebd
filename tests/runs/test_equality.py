"""A flow called eagerly and the compiled flow end with the same parameters, bit for bit."""

import dataclasses
from pathlib import Path

import pytest
import torch

import rlflow
from rlflow.author.load import load_flow
from rlflow.config.flags import flat
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.api import resolve_config
from rlflow.runs.prepare import prepare
from rlflow.runs.session import start_run

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

FLOWS = {
    "ppo": {"max_tokens": 6, "minibatch": 4, "epochs": 2},
    "ppo_adaptive": {"max_tokens": 6, "minibatch": 4, "dual_clip": 3.0, "warmup": 1},
    "grpo": {"max_tokens": 6, "minibatch": 16, "samples": 4, "beta": 0.1},
    "rloo": {"max_tokens": 6, "minibatch": 16},
    "remax": {"max_tokens": 6, "minibatch": 4},
    "reinforce_pp": {"max_tokens": 6, "minibatch": 16, "baseline": True},
    "dapo": {"max_tokens": 6, "minibatch": 8, "samples": 4, "groups": 3, "tries": 3, "overlong": 3},
    "gspo": {"max_tokens": 6, "minibatch": 16, "samples": 4},
    "cispo": {"max_tokens": 6, "minibatch": 16, "samples": 4, "epochs": 2},
    "gmpo": {"max_tokens": 6, "minibatch": 16, "samples": 4},
    "clip_cov": {"max_tokens": 6, "minibatch": 16, "samples": 4, "share": 0.1},
    "prime": {"max_tokens": 6, "minibatch": 16},
    "opo": {"max_tokens": 6, "samples": 4},
    "online_dpo": {"max_tokens": 6, "minibatch": 8},
    "prorl": {"max_tokens": 6, "minibatch": 16, "samples": 4, "reset": 2},
    "distill": {"max_tokens": 6, "minibatch": 16},
    "gpg": {"max_tokens": 6, "minibatch": 16, "samples": 4},
    "curriculum": {"max_tokens": 6, "minibatch": 8, "samples": 4, "chosen": 2},
    "selfplay": {"max_tokens": 6, "minibatch": 9, "samples": 2},
    "expert_iteration": {
        "max_tokens": 6,
        "minibatch": 8,
        "samples": 4,
        "replayed": 4,
        "kept": 16,
        "threshold": 0.5,
    },
    "replay_grpo": {"max_tokens": 6, "minibatch": 16, "samples": 4, "replayed": 2, "kept": 8},
    "spo": {"max_tokens": 6, "minibatch": 2},
}


def parameters(engine):
    return {
        (role, name): tensor.clone()
        for role, model in engine.models.items()
        if model.trainer is not None
        for name, tensor in model.trainer.state().items()
    }


PAIRS = {"dpo": {"minibatch": 8}, "tr_dpo": {"minibatch": 8, "tau": 2}, "reward_model": {"minibatch": 8}}


QUICK = ("ppo", "grpo", "dapo")  # the others are in the slow tier


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in (*FLOWS, *PAIRS)]
)
def test_eager_and_compiled_runs_end_identical(name, task):
    task |= {"held_out": 0, "prompts": 4}
    if name == "distill":
        task["teacher"] = {"model": str(Path(task["model"]).parent / "arithmetic_teacher")}
    if name in PAIRS:
        task["data"] = str(Path(task["model"]).parent / "arithmetic_pairs.jsonl")
    flow = load_flow(name)
    hp = dataclasses.replace(flow.parameters.hp, **{**FLOWS, **PAIRS}[name])

    eager = rlflow.roles(flow, hp, **task)
    for _ in range(task["iterations"]):
        flow(eager.take(), **eager)
    eager.close()

    config, hp = resolve_config(flow, hp, flat(task))
    compiled = prepare(flow, hp, config)
    start_run(compiled, Quiet())

    one, two = parameters(eager.prepared.engine), parameters(compiled.engine)
    assert one.keys() == two.keys()
    assert len(one) > 10
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_an_update_changes_the_parameters_as_the_seed_decides(task):
    """Without this test, the equality above would also hold for runs that learn nothing."""
    ends = {}
    for seed in (0, 0, 1):
        roles = rlflow.roles(
            "grpo", dataclasses.replace(load_flow("grpo").parameters.hp, **FLOWS["grpo"]), **task, seed=seed
        )
        before = parameters(roles.prepared.engine)
        load_flow("grpo")(roles.take(), **roles)
        after = parameters(roles.prepared.engine)
        assert any(not torch.equal(before[key], after[key]) for key in before)
        ends.setdefault(seed, []).append(after)
        roles.close()
    same, again = ends[0]
    assert all(torch.equal(same[key], again[key]) for key in same)
    assert any(not torch.equal(same[key], ends[1][0][key]) for key in same)
