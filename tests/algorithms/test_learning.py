"""Short learning runs of shipped algorithms on the packaged task: held-out accuracy rises by a stated margin.

`rlflow bench learning` has the full runs.
"""

import json

import pytest

import rlflow

SHORT = {
    "ppo": {"prompts": 128, "iterations": 5, "hp": {"minibatch": 64}},
    "ppo_adaptive": {"prompts": 128, "iterations": 5, "hp": {"minibatch": 64, "dual_clip": 3.0, "warmup": 1}},
    "ppo_turns": {"prompts": 128, "iterations": 5, "hp": {"minibatch": 64}},  # in three turns
    "vapo": {"prompts": 128, "iterations": 7, "hp": {"minibatch": 64}},
    "grpo": {"prompts": 24, "iterations": 5, "hp": {"minibatch": 96}},
    "grpo: kl": {
        "prompts": 24,
        "iterations": 5,
        "hp": {"minibatch": 96, "beta": 0.01, "estimator": "k3-weighted"},
    },
    "sft": {"iterations": 9},
    "rloo": {"prompts": 24, "iterations": 5, "hp": {"samples": 8, "minibatch": 96}},
    "remax": {"prompts": 192, "iterations": 5, "hp": {"samples": 1, "minibatch": 96, "beta": 0.005}},
    "reinforce_pp": {"prompts": 48, "iterations": 4, "hp": {"minibatch": 96}},
    "dapo": {"prompts": 24, "iterations": 10, "hp": {"groups": 12, "minibatch": 96}},
    "gspo": {"prompts": 24, "iterations": 5, "hp": {"minibatch": 96}},
    "gmpo": {"prompts": 24, "iterations": 5, "hp": {"samples": 8, "minibatch": 96}},
    "clip_cov": {"prompts": 24, "iterations": 6, "hp": {"minibatch": 96}},
    "sapo": {"prompts": 24, "iterations": 5, "hp": {"minibatch": 96}},
    "topr": {"prompts": 24, "iterations": 6, "hp": {"minibatch": 96}},
    "prime": {"prompts": 24, "iterations": 6, "hp": {"minibatch": 96}},
    "cispo": {"prompts": 24, "iterations": 6, "hp": {"samples": 8, "minibatch": 96}},
    "dpo": {"iterations": 12},
    "prorl": {"prompts": 24, "iterations": 6, "hp": {"samples": 8, "minibatch": 96, "reset": 3}},
    "tr_dpo": {"iterations": 12, "hp": {"tau": 4}},
    "online_dpo": {"prompts": 48, "iterations": 10},
    "distill": {"prompts": 48, "iterations": 8, "hp": {"minibatch": 96}},
    "opo": {"prompts": 16, "iterations": 15, "hp": {}},
    "raft": {"prompts": 24, "iterations": 8, "hp": {"minibatch": 16}},
    "cppo": {"prompts": 24, "iterations": 5, "hp": {"samples": 8, "kept": 4, "minibatch": 48}},
    "gdpo": {"prompts": 24, "iterations": 5, "hp": {"minibatch": 96}},
    "luffy": {"prompts": 48, "iterations": 6, "hp": {"minibatch": 96}},
    "correction": {"prompts": 24, "iterations": 7, "hp": {"minibatch": 96}},
    "critique": {"prompts": 16, "iterations": 6, "hp": {"minibatch": 64}},
    "debate": {"prompts": 16, "iterations": 5, "hp": {"minibatch": 64}},
    "vineppo": {"prompts": 32, "iterations": 6, "hp": {"minibatch": 64}},
    "gpg": {"prompts": 24, "iterations": 10, "hp": {"samples": 8, "minibatch": 96}},
    "curriculum": {"prompts": 48, "iterations": 6, "hp": {"chosen": 24, "minibatch": 96}},
    "selfplay": {"prompts": 24, "iterations": 7, "hp": {"minibatch": 108}},
    "expert_iteration": {"prompts": 24, "iterations": 6, "hp": {"replayed": 24, "minibatch": 48}},
    "replay_grpo": {"prompts": 24, "iterations": 6, "hp": {"replayed": 24, "minibatch": 96}},
    "spo": {"prompts": 192, "iterations": 6, "hp": {"minibatch": 96}},
}


# test_invariance.py compares the gradients of the other algorithms in each run of the tests
OFTEN = {"ppo", "grpo", "dapo", "dpo", "sft"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in OFTEN else pytest.mark.long) for name in SHORT],
)
def test_a_short_run_learns(name, tmp_path):
    keywords = dict(SHORT[name])
    hp = keywords.pop("hp", {})
    keywords |= {f"hp.{key}": value for key, value in hp.items()}
    result = rlflow.run(name.partition(":")[0], held_out=200, out=str(tmp_path), **keywords)
    assert result.before.sampled < 0.55
    assert result.after.sampled > result.before.sampled + 0.12
    # None if the flow has its own evaluation
    assert result.after.greedy is None or result.after.greedy > result.before.greedy


@pytest.mark.slow
def test_a_reward_model_learns_to_prefer(tmp_path):
    result = rlflow.run("reward_model", iterations=25, out=str(tmp_path))
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    accuracy = [row["reward.update/accuracy"] for row in rows if "reward.update/accuracy" in row]
    assert accuracy[0] < 0.6
    assert sum(accuracy[-5:]) / 5 > 0.62
