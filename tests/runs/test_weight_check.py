"""The weight check: trainer and generator score the same fixed tokens."""

import json
import sys
import types

import pytest
from keyed import figures

import rlflow
from rlflow.author.batch import Batch
from rlflow.backends import local
from rlflow.runs.guards import weight_check_rows, weight_check_warnings

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not


class Deaf(local.Generator):
    """A generator that receives new weights but keeps one matrix."""

    def receive(self, weights, version):
        own = dict(self.network.tensors())
        kept = "model.layers.0.self_attn.q_proj.weight"
        super().receive(
            ((name, own[kept].clone() if name == kept else tensor) for name, tensor in weights), version
        )


class Other(local.Generator):
    """The local generator under another name."""


@pytest.fixture
def backends(monkeypatch):
    for kind in (Deaf, Other):
        module = types.ModuleType(f"canary_backends.{kind.__name__.lower()}")
        module.Generator, module.Trainer = kind, local.Trainer
        monkeypatch.setitem(sys.modules, "canary_backends", types.ModuleType("canary_backends"))
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def metrics(task, backends):
    """``metrics(generator)``: the metrics of two iterations of a run with this generator."""

    def metrics(generator, **more):
        small = {
            "prompts": 4,
            "held_out": 0,
            "threads": 1,
            "lr": 0.01,
            "hp.samples": 4,
            "hp.max_tokens": 4,
            "save_every": 0,
        }
        result = rlflow.run("grpo", **{**task, **small, "actor.generator": generator, **more})
        return [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]

    return metrics


def test_a_missing_weight_is_detected(metrics):
    good, bad = metrics("canary_backends.other"), metrics("canary_backends.deaf")
    assert all(line["canary/actor_max"] < 1e-5 for line in good)
    assert bad[0]["canary/actor_max"] < 1e-5  # nothing has been learned yet
    assert all(line["canary/actor_max"] > 1e-3 for line in bad[1:])


@pytest.mark.parametrize(("generator", "settings"), [("local", {}), ("canary_backends.other", {"canary": 0})])
def test_one_backend_needs_no_weight_check(metrics, generator, settings):
    lines = metrics(generator, **settings)
    assert len(lines) == 2
    assert not any("canary" in name for line in lines for name in line)


def test_the_fixed_tokens_are_two_halves_of_prompts():
    rows = weight_check_rows(Batch.of(prompt_tokens=[[1, 2, 3], [4], [5, 6]]))
    assert rows["prompt_tokens"].tolist() == [[1], [5]]
    assert rows["tokens"].tolist() == [[2, 3], [6, 0]]
    assert rows.data["tokens"].lengths.tolist() == [2, 1]


def test_a_large_difference_is_reported():
    (said,) = weight_check_warnings(
        figures({"canary/actor_factor": 1.5, "canary/actor_max": 2.0, "canary/critic_factor": 1.0}), 1.05
    )
    assert "role 'actor'" in said
    assert not list(
        weight_check_warnings(figures({"canary/actor_factor": 1.01, "canary/actor_max": 0.1}), 1.05)
    )


def test_bfloat16_rounding_is_not_reported():
    rounded, apart = (
        figures({"canary/actor_factor": factor, "canary/actor_max": 0.7}) for factor in (1.08, 1.2)
    )
    assert list(weight_check_warnings(rounded, 1.05))
    assert not list(weight_check_warnings(rounded, 1.05, "bfloat16"))
    (said,) = weight_check_warnings(apart, 1.05, "bfloat16")
    assert "by a mean factor of 1.2 (--max-mismatch 1.05, with the rounding of bfloat16 1.15)" in said
