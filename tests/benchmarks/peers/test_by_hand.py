"""The hand-written PPO loop: it samples recorded lengths and trains both models with the functions of `ppo`."""

import json

import pytest

from rlflow.benchmarks.peers.by_hand import System
from rlflow.benchmarks.suites.fixed_shape import make


def weights(system, role):
    return [tensor.clone() for _, tensor in system.engine.models[role].trainer.weights()]


@pytest.mark.slow
def test_the_loop_samples_recorded_lengths_and_trains_both_models(tmp_path):
    make(tmp_path)
    (tmp_path / "own.json").write_text(json.dumps({"lengths": [5, 1, 9, 2, 3, 4]}))
    flags = {
        "model": str(tmp_path / "model"),
        "data": str(tmp_path / "data.jsonl"),
        "reward": f"{tmp_path}/reward.py:digits",
        "prompts": 2,
        "iterations": 3,
        "hp.samples": 2,
        "hp.max_tokens": 9,
        "hp.minibatch": 4,
        "actor.generate.lengths": str(tmp_path / "own.json"),
        "held_out": 0,
        "device": "cpu",
    }
    system = System()
    try:
        assert system.prepare({"flags": flags}, str(tmp_path), 0) == {"iterations": 3}
        before = {role: weights(system, role) for role in ("actor", "critic", "reference")}
        first, last = system.iterate(2), system.iterate(2)
        assert [row["tokens"] for row in (*first["iterations"], *last["iterations"])] == [17, 13, 18]
        assert (first["ended"], last["ended"]) == (False, True)
        pairs = {role: zip(old, weights(system, role), strict=True) for role, old in before.items()}
        moved = {role: any((one != other).any() for one, other in each) for role, each in pairs.items()}
        assert moved == {"actor": True, "critic": True, "reference": False}
    finally:
        system.close()
