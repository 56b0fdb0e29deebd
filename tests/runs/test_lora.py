"""Runs that train adapters: a resumed run ends the same, and the saved model is a plain model."""

import contextlib
import io
import signal

import pytest
import torch
from run_faults import MODEL, content, differences, in_child, resumed, run, signal_at
from sources import ROOT
from transformers import AutoModelForCausalLM

import rlflow
from rlflow.checkpoints.export import export
from rlflow.checkpoints.reading import load_latest
from rlflow.cli.main import exit_code
from rlflow.errors import PlanError
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import resume


@pytest.fixture
def adapters(task, tmp_path):
    return {
        **task,
        "iterations": 4,
        "held_out": 0,
        "save_every": 1,
        "lora": 4,
        "lr": 1e-2,
        "out": str(tmp_path / "runs"),
    }


@pytest.mark.slow
def test_a_resumed_run_of_adapters_ends_the_same(adapters):
    straight = run("ppo", adapters, "straight").folder

    def cut():
        signal_at("actor.update", 3, signal.SIGKILL)
        run("ppo", adapters, "cut")

    assert in_child(cut) == -signal.SIGKILL
    assert resumed(straight.parent / "cut") == 0
    one, other = content(straight.parent / "cut"), content(straight)
    assert list(differences(one, other)) == []
    adapter = "adapters/model.layers.0.self_attn.q_proj.lora_B.weight"
    assert all(other.tensors[f"{role}.optimizer"][adapter].abs().max() > 0 for role in ("actor", "critic"))
    assert other.tensors["critic.parameters"]["value_head.weight"].abs().max() > 0


@pytest.mark.slow
def test_the_final_model_and_the_export_hold_the_merged_weights(adapters, tmp_path):
    folder = run("grpo", {**adapters, "iterations": 2}, "one").folder
    export(folder, tmp_path / "exported")
    final, exported, base = (
        AutoModelForCausalLM.from_pretrained(one).state_dict()
        for one in (folder / "final" / "actor", tmp_path / "exported", MODEL)
    )
    assert final.keys() == exported.keys() == base.keys()
    assert all(torch.equal(tensor, exported[name]) for name, tensor in final.items())
    changed = {name for name in final if not torch.equal(final[name], base[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)
    moments = load_latest(folder).snapshot.tensors["actor.optimizer"]
    assert all("lora_" in name for name in moments if name.startswith("exp_avg"))


@pytest.mark.slow
def test_an_export_of_adapters_in_bfloat16_is_as_precise_as_the_final_model(adapters, tmp_path):
    folder = run("grpo", {**adapters, "iterations": 1, "dtype": "bfloat16", "lr": 1e-4}, "one").folder
    export(folder, tmp_path / "exported")
    written = (folder / "final" / "actor", tmp_path / "exported")
    final, exported = (AutoModelForCausalLM.from_pretrained(one).state_dict() for one in written)
    assert {tensor.dtype for tensor in final.values()} == {torch.float32}
    assert all(torch.equal(tensor, exported[name]) for name, tensor in final.items())
    assert (folder / "final" / "actor" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_fork_can_train_all_weights_but_not_other_adapters(adapters):
    folder = run("grpo", {**adapters, "iterations": 1}, "one").folder
    with pytest.raises(PlanError, match="do not match the adapters"):
        resume.fork(folder, {"iterations": 2, "lora": 2}, Quiet())
    assert resume.fork(folder, {"iterations": 2, "lora": 0}, Quiet()).iterations == 2


@pytest.mark.slow
def test_adapters_learn_sums(tmp_path):
    result = rlflow.run(
        "grpo",
        prompts=24,
        iterations=6,
        held_out=100,
        lora=8,
        lr=3e-3,
        out=str(tmp_path),
        **{"hp.minibatch": 96},
    )
    assert result.before.sampled < 0.5
    assert result.after.sampled > result.before.sampled + 0.15


def printed(*words):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return exit_code(list(words)), out.getvalue()


def test_help_check_and_run_know_the_adapter_settings(tmp_path):
    file = str(ROOT / "algorithms" / "grpo.py")
    assert printed("check", file, "--actor.lora", "8", "--actor.lora-targets", "attention")[0] == 0
    assert "nearest:  --actor.lora" in printed("check", file, "--actor.lorra", "8")[1]
    code, text = printed("run", file, "--lora", "-1", "--out", str(tmp_path))
    assert (code, "expected: int >= 0" in text) == (2, True)
    code, text = printed("run", file, "--help")
    assert code == 0
    for name in (
        "lora int >= 0 = 0",
        "lora_alpha float > 0 and < inf = 16.0",
        "lora_targets 'all-linear' | 'attention' = all-linear",
    ):
        assert f"--ROLE.{name}" in text
