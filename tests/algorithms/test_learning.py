"""Short learning runs of what ships, on the packaged task: held-out accuracy rises by a stated margin. The full runs are in
benchmarks/learn.py."""

import pytest

import rlflow

SHORT = {
    "ppo": {"prompts": 128, "iterations": 10, "hp": {"minibatch": 64}},
    "grpo": {"prompts": 24, "iterations": 10, "hp": {"minibatch": 96}},
    "sft": {"iterations": 30},
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
