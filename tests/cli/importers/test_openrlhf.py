"""OpenRLHF's flags become a configuration of rlflow. Each flag is known; flags that would compute something
else are refused."""

import json
import os
from pathlib import Path

import pytest

from rlflow.author.load import load_flow
from rlflow.cli.importers import openrlhf
from rlflow.cli.main import exit_code
from rlflow.config.packaged import packaged

HERE = Path(__file__).parent
FLAGS = (HERE / "fixtures" / "openrlhf-0.11.2-flags.txt").read_text().split()
PUBLISHED = (HERE / "fixtures" / "openrlhf-0.11.2-ppo.sh").read_text()
REWARD = (
    "def reward_func(queries, prompts, labels):\n    return [float(label in query) for query, label "
    "in zip(queries, labels)]\n"
)


def imported_from(words):
    return openrlhf.imported(openrlhf.read(f"python3 -m openrlhf.cli.train_ppo_ray {words}", "run.sh"))


def test_each_flag_of_the_release_is_in_exactly_one_list():
    assert {flag: lists for flag in FLAGS if len(lists := openrlhf.KEYS.lists(flag)) != 1} == {}
    assert {*openrlhf.KEYS.defaults, *openrlhf.KEYS.neutral} <= {*FLAGS, "pretrain_data"}


def test_the_published_command_gives_its_golden_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("published.sh").write_text(PUBLISHED)
    assert exit_code(["import", "openrlhf", "published.sh"]) == 0
    golden = HERE / "golden" / "openrlhf-0.11.2-ppo.toml"
    if os.environ.get("RLFLOW_WRITE_GOLDEN"):
        golden.write_text(Path("run.toml").read_text())
    assert Path("run.toml").read_text() == golden.read_text()
    assert "# not supported: reward.normalize_enable = True: " in golden.read_text()
    said = capsys.readouterr()
    assert "reward.normalize_enable = True is not supported" in said.err
    assert all(flag in said.out for flag in openrlhf.read(PUBLISHED, "published.sh"))


def test_nothing_is_written_for_an_unknown_algorithm_or_value(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words in ("--algo.advantage.estimator flash_reinforce", "--actor.adam.lr $LR"):
        Path("run.sh").write_text(f"python3 -m openrlhf.cli.train_ppo_ray {words}\n")
        assert exit_code(["import", "openrlhf", "run.sh"]) == 2
        assert not Path("run.toml").exists()


@pytest.mark.slow
def test_the_written_file_passes_check_and_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("reward_func.py").write_text(REWARD)
    Path("prompts.jsonl").write_text(
        "".join(json.dumps({"input": f"{n} =", "answer": str(n)}) + "\n" for n in range(32))
    )
    Path("run.sh").write_text(
        "python3 -m openrlhf.cli.train_ppo_ray --data.prompt_dataset prompts.jsonl \\\n  "
        "--actor.model_name_or_path MODEL \\\n  --data.label_key answer --reward.remote_url "
        "reward_func.py --algo.advantage.estimator group_norm \\\n  --algo.kl.init_coef 0.001 "
        "--algo.kl.use_loss --algo.kl.estimator k3 --rollout.n_samples_per_prompt 4 \\\n  "
        "--rollout.batch_size 8 --train.batch_size 16 --rollout.max_new_tokens 8 --data.max_len "
        "64\n".replace("MODEL", str(packaged("grpo")[1]["model"]))
    )
    assert exit_code(["import", "openrlhf", "run.sh"]) == 0
    assert exit_code(["check", "grpo", "--config", "run.toml"]) == 0
    null = ["--backend", "null", "--iterations", "1", "--held-out", "0", "--out", "runs", "--name", "moved"]
    assert exit_code(["run", "grpo", "--config", "run.toml", *null]) == 0
    lines = [json.loads(line) for line in Path("runs/moved/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["actor.update/steps"] == 8 * 4 / 16


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ("--algo.advantage.estimator flash_reinforce --algo.kl.init_coef 0", "algo.advantage.estimator"),
        ("--algo.advantage.estimator group_norm --algo.kl.init_coef 0.02", "algo.kl.init_coef"),
        (
            "--algo.advantage.estimator group_norm --algo.kl.init_coef 0 --actor.dual_clip 3",
            "actor.dual_clip",
        ),
        ("--actor.optim muon", "actor.optim"),
        ("--train.async_enable", "train.async_enable"),
        ("--train.agent_func_path agent.py", "train.agent_func_path"),
        ("--algo.advantage.is_correction_level token", "algo.advantage.is_correction_level"),
        ("--reward.stop_properly_penalty_coef 0.5", "reward.stop_properly_penalty_coef"),
        ("--reward.overlong_buffer_len 100", "reward.overlong_buffer_len"),
        ("--actor.policy_loss_type gspo", "actor.policy_loss_type"),
        ("--algo.dynamic_filtering_enable", "algo.dynamic_filtering_enable"),
        ("--algo.advantage.no_std_norm", "algo.advantage.no_std_norm"),
        ("--actor.loss_agg_mode seq-mean-token-mean", "actor.loss_agg_mode"),
        (
            "--algo.advantage.estimator group_norm --algo.kl.init_coef 0 --actor.eps_clip_low_high 0.2 0.28",
            "actor.eps_clip_low_high",
        ),
        ("--algo.kl.use_loss", "algo.kl.use_loss"),
        ("--actor.lr_scheduler inverse_sqrt", "actor.lr_scheduler"),
        ("--ds.param_dtype fp16", "ds.param_dtype"),
        ("--moon.phase full", "moon.phase"),
    ],
)
def test_flags_that_change_the_computation_are_refused_by_name(words, key):
    found = imported_from(words)
    assert list(found.unsupported) == [key]


@pytest.mark.parametrize(
    ("words", "flow", "flags"),
    [
        (
            "--algo.advantage.estimator dr_grpo --algo.kl.init_coef 0",
            "grpo",
            {"hp.deviation": False, "hp.mean": "constant", "hp.beta": 0},
        ),
        (
            "--algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0.02",
            "reinforce_pp",
            {"hp.baseline": True, "hp.beta": 0.02},
        ),
        (
            (
                "--algo.advantage.estimator group_norm --algo.kl.init_coef 0 --algo.dynamic_filtering_enable "
                "--actor.eps_clip_low_high 0.2 0.28"
            ),
            "dapo",
            {"hp.clip_low": 0.2, "hp.clip_high": 0.28, "hp.groups": 1024},
        ),
        (
            "--actor.dual_clip 3 --critic.freezing_steps 10 --advantage_estimator gae",
            "ppo",
            {"hp.dual_clip": 3, "hp.warmup": 10},
        ),
        (
            (
                "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip "
                "--algo.advantage.is_correction_threshold 5.0"
            ),
            "ppo",
            {"hp.is_cap": 5.0},
        ),
        (
            "--data.prompt_dataset a.jsonl,b.jsonl --data.prompt_probs 0.7,0.3",
            "ppo",
            {"data": ["a.jsonl:0.7", "b.jsonl:0.3"]},
        ),
        (
            "--reward.remote_url http://a:5000/get_reward --data.input_template 'Q: {} A:'",
            "ppo",
            {"reward": ["http://a:5000/get_reward"], "data.template": "Q: {prompt} A:"},
        ),
    ],
)
def test_flags_with_a_counterpart_are_imported(words, flow, flags):
    found = imported_from(words)
    assert (found.unsupported, found.flow) == ({}, flow)
    assert flags.items() <= found.flags.items()
    assert {name for name in found.flags if name.startswith("hp.")} <= {
        f"hp.{name}" for name in vars(load_flow(flow).parameters.hp)
    }
