"""verl's configuration becomes one of rlflow. Each of its keys is known; keys that would compute something
else are refused."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from rlflow.author.load import load_flow
from rlflow.cli.importers import verl
from rlflow.cli.main import exit_code
from rlflow.config.packaged import packaged

HERE = Path(__file__).parent
WHOLE = HERE / "fixtures" / "verl-0.9.1-ppo_trainer.yaml"
SCRIPT = HERE / "fixtures" / "verl-grpo.sh"
LEAVES = dict(verl._leaves(yaml.load(WHOLE.read_text(), yaml.CSafeLoader)))


def imported_from(**given):
    return verl.imported(
        {
            "actor_rollout_ref.model.path": "m",
            **{name.replace("__", "."): value for name, value in given.items()},
        }
    )


def test_each_key_of_the_release_is_in_exactly_one_list():
    assert {key: lists for key in LEAVES if len(lists := verl.KEYS.lists(key)) != 1} == {}
    assert {*verl.KEYS.defaults, *verl.KEYS.neutral} <= LEAVES.keys()
    assert len(LEAVES) > 800


def test_defaults_equal_those_of_the_release():
    known = {**{key: values[0] for key, values in verl.KEYS.neutral.items()}, **verl.KEYS.defaults}
    assert {
        key: LEAVES[key] for key in known if LEAVES[key] != known[key] and "${" not in str(LEAVES[key])
    } == {}


@pytest.mark.parametrize("file", [WHOLE, SCRIPT], ids=lambda file: file.stem)
def test_a_configuration_becomes_its_golden_file(file, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.chdir(tmp_path)
    assert exit_code(["import", "verl", str(file), "-o", "run.toml"]) == 0
    golden = HERE / "golden" / f"{file.stem}.toml"
    if os.environ.get("RLFLOW_WRITE_GOLDEN"):
        golden.write_text(Path("run.toml").read_text())
    assert Path("run.toml").read_text() == golden.read_text()
    said = capsys.readouterr().out
    assert all(key in said for key in verl.read(file.read_text(), file.name))


@pytest.mark.slow
def test_the_written_file_passes_check_and_runs(tmp_path, monkeypatch):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copy(HERE / "fixtures" / "verl-0.9.1-gsm8k.py.txt", tmp_path / "gsm8k.py")
    (tmp_path / "data" / "gsm8k").mkdir(parents=True)
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{i}+{i}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i},
        }
        for i in range(64)
    ]
    for name in ("train", "test"):
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data" / "gsm8k" / f"{name}.parquet")
    assert exit_code(["import", "verl", str(SCRIPT), "-o", "run.toml"]) == 0
    assert exit_code(["check", "grpo", "--config", "run.toml"]) == 0
    null = [
        "--backend",
        "null",
        "--model",
        str(packaged("grpo")[1]["model"]),
        "--iterations",
        "1",
        "--out",
        "runs",
        "--name",
        "moved",
    ]
    assert exit_code(["run", "grpo", "--config", "run.toml", *null]) == 0
    lines = [json.loads(line) for line in Path("runs/moved/metrics.jsonl").read_text().splitlines()]
    assert any(line.get("actor.update/steps") == 64 * 4 / 64 for line in lines)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"algorithm__adv_estimator": "grpo_passk"}, "algorithm.adv_estimator"),
        (
            {
                "algorithm__adv_estimator": "grpo",
                "actor_rollout_ref__actor__policy_loss__loss_mode": "dppo_tv",
            },
            "actor_rollout_ref.actor.policy_loss.loss_mode",
        ),
        (
            {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__actor__clip_ratio_high": 0.28},
            "actor_rollout_ref.actor.clip_ratio_high",
        ),
        (
            {"algorithm__adv_estimator": "grpo", "actor_rollout_ref__actor__clip_ratio_c": 10.0},
            "actor_rollout_ref.actor.clip_ratio_c",
        ),
        ({"actor_rollout_ref__actor__entropy_coeff": 0.001}, "actor_rollout_ref.actor.entropy_coeff"),
        ({"actor_rollout_ref__actor__use_kl_loss": True}, "actor_rollout_ref.actor.use_kl_loss"),
        (
            {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"},
            "algorithm.kl_ctrl.type",
        ),
        (
            {"algorithm__rollout_correction__rollout_is": "sequence"},
            "algorithm.rollout_correction.rollout_is",
        ),
        ({"critic__ppo_epochs": 3}, "critic.ppo_epochs"),
        ({"algorithm__filter_groups__enable": True}, "algorithm.filter_groups.enable"),
        ({"algorithm__norm_adv_by_std_in_grpo": False}, "algorithm.norm_adv_by_std_in_grpo"),
        (
            {"actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean"},
            "actor_rollout_ref.actor.loss_agg_mode",
        ),
        (
            {
                "algorithm__adv_estimator": "grpo",
                "actor_rollout_ref__actor__use_kl_loss": True,
                "actor_rollout_ref__actor__kl_loss_type": "abs",
            },
            "actor_rollout_ref.actor.kl_loss_type",
        ),
        ({"algorithm__use_kl_in_reward": True, "algorithm__kl_penalty": "mse"}, "algorithm.kl_penalty"),
        (
            {"algorithm__adv_estimator": "grpo", "algorithm__use_kl_in_reward": True},
            "algorithm.use_kl_in_reward",
        ),
        ({"trainer__moon_phase": "full"}, "trainer.moon_phase"),
    ],
)
def test_keys_that_change_the_computation_are_refused_by_name(given, key):
    assert list(imported_from(**given).unsupported) == [key]


@pytest.mark.parametrize(
    ("given", "flow", "flags"),
    [
        (
            {
                "algorithm__adv_estimator": "grpo",
                "algorithm__filter_groups__enable": True,
                "actor_rollout_ref__actor__clip_ratio_high": 0.28,
                "actor_rollout_ref__actor__clip_ratio_c": 10.0,
            },
            "dapo",
            {"hp.clip_low": 0.2, "hp.clip_high": 0.28, "hp.dual_clip": 10.0, "hp.groups": 1024},
        ),
        (
            {"algorithm__adv_estimator": "reinforce_plus_plus_baseline"},
            "reinforce_pp",
            {"hp.baseline": True, "hp.clip": 0.2, "hp.beta": 0.0},
        ),
        (
            {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__kl_coef": 0.01},
            "ppo",
            {"hp.beta": 0.01, "hp.lam": 1.0},
        ),
        (
            {
                "algorithm__adv_estimator": "grpo",
                "actor_rollout_ref__actor__policy_loss__loss_mode": "gspo",
                "actor_rollout_ref__actor__clip_ratio_low": 0.0003,
                "actor_rollout_ref__actor__clip_ratio_high": 0.0004,
                "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-mean",
            },
            "gspo",
            {"hp.clip_low": 0.0003, "hp.clip_high": 0.0004},
        ),
        (
            {
                "algorithm__adv_estimator": "grpo",
                "algorithm__norm_adv_by_std_in_grpo": False,
                "actor_rollout_ref__actor__loss_agg_mode": "seq-mean-token-sum-norm",
            },
            "grpo",
            {"hp.deviation": False, "hp.mean": "constant"},
        ),
        (
            {"data__apply_chat_template_kwargs__enable_thinking": False},
            "ppo",
            {"data.template_kwargs": '{"enable_thinking": false}'},
        ),
        (
            {"data__apply_chat_template_kwargs": "{enable_thinking: False, day: 'May 1'}"},
            "ppo",
            {"data.template_kwargs": '{"enable_thinking": false, "day": "May 1"}'},
        ),
        ({"data__apply_chat_template_kwargs": "{}"}, "ppo", {}),
    ],
)
def test_keys_with_a_counterpart_are_imported(given, flow, flags):
    found = imported_from(**given)
    assert (found.unsupported, found.flow) == ({}, flow)
    assert flags.items() <= found.flags.items()
    hp = load_flow(flow).parameters.hp
    assert {name for name in found.flags if name.startswith("hp.")} <= {f"hp.{name}" for name in vars(hp)}
