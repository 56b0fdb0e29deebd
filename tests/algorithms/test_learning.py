"""Short learning runs of what ships, on the packaged task: held-out accuracy rises by a stated margin. The full runs are in
benchmarks/learn.py."""

import pytest

import rlflow

SHORT = {
    "ppo": {"prompts": 128, "iterations": 10, "hp": {"minibatch": 64}},
    "grpo": {"prompts": 24, "iterations": 10, "hp": {"minibatch": 96}},
    "sft": {"iterations": 30},
    "rloo": {"prompts": 24, "iterations": 8, "hp": {"samples": 8, "minibatch": 96}},
    "remax": {"prompts": 192, "iterations": 6, "hp": {"samples": 1, "minibatch": 96, "beta": 0.005}},
    "reinforce_pp": {"prompts": 48, "iterations": 8, "hp": {"minibatch": 96}},
    "dapo": {"prompts": 24, "iterations": 10, "hp": {"groups": 12, "minibatch": 96}},
    "gspo": {"prompts": 24, "iterations": 10, "hp": {"minibatch": 96}},
    "cispo": {"prompts": 24, "iterations": 10, "hp": {"samples": 8, "minibatch": 96}},
    "opo": {"prompts": 16, "iterations": 25, "hp": {}},
    "gpg": {"prompts": 24, "iterations": 10, "hp": {"samples": 8, "minibatch": 96}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_a_short_run_learns(name, tmp_path):
    keywords = dict(SHORT[name])
    hp = keywords.pop("hp", {})
    result = rlflow.run(name, held_out=200, out=str(tmp_path), **{f"hp.{key}": value for key, value in hp.items()}, **keywords)
    assert result.before.sampled < 0.55
    assert result.after.sampled > result.before.sampled + 0.12
    assert result.after.greedy > result.before.greedy
