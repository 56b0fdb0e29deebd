"""TRL's scripts and YAML files become a configuration of rlflow. Each key is known; a key that would compute
something else becomes a comment."""

import ast
import json
import os
import shutil
from pathlib import Path

import pytest

from rlflow.author.load import load_flow
from rlflow.cli.importers import trl
from rlflow.cli.main import exit_code
from rlflow.config.packaged import packaged

HERE = Path(__file__).parent
FIXTURES = HERE / "fixtures"
FIELDS = dict(line.split(" = ", 1) for line in (FIXTURES / "trl-1.16.0-fields.txt").read_text().splitlines())
# keys of earlier releases, of the trainer's arguments and of LoraConfig
MORE = {"max_prompt_length", "warmup_ratio", "model", "reward_funcs", "train_dataset", "eval_dataset"}
MORE |= {"callbacks", "optimizers", "quantization_config", "tools", "rollout_func", "environment_factory"}
# defaults that TRL or transformers work out later
COMPUTED = {"optim", "lr_scheduler_type"}


def imported_from(**given):
    return trl.imported({"model": "m", **{name.replace("__", "."): value for name, value in given.items()}})


def test_each_key_of_the_release_is_in_exactly_one_list():
    assert {key: lists for key in FIELDS if len(lists := trl.KEYS.lists(key)) != 1} == {}
    known = {*trl.KEYS.defaults, *trl.KEYS.neutral}
    assert {key for key in known - FIELDS.keys() - MORE if not key.startswith("peft_config.")} == {"datasets"}
    assert len(FIELDS) > 200


def test_defaults_equal_those_of_the_release():
    known = {**{key: values[0] for key, values in trl.KEYS.neutral.items()}, **trl.KEYS.defaults}
    assert {
        key: FIELDS[key]
        for key in known.keys() & FIELDS.keys() - COMPUTED
        if ast.literal_eval(FIELDS[key]) != known[key]
    } == {}


@pytest.mark.parametrize("name", ["trl-1.16.0-readme.py", "trl-grpo.py", "trl-grpo.yaml"])
def test_a_script_becomes_its_golden_file(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = FIXTURES / (name if name.endswith("yaml") else f"{name}.txt")
    shutil.copy(source, name)
    assert exit_code(["import", "trl", name]) == 0
    golden = HERE / "golden" / f"{Path(name).stem}{'-yaml' * name.endswith('yaml')}.toml"
    if os.environ.get("RLFLOW_WRITE_GOLDEN"):
        golden.write_text(Path("run.toml").read_text())
    assert Path("run.toml").read_text() == golden.read_text()
    said = capsys.readouterr().out
    assert all(key in said for key in trl.read(source.read_text(), name))


@pytest.mark.slow
def test_the_written_file_passes_check_and_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (FIXTURES / "trl-grpo.py.txt").read_text()
    text = text.replace('load_dataset("openai/gsm8k", "main", split="train")', '"train.jsonl"')
    text = "".join(
        line for line in text.splitlines(True) if not line.startswith(("from trl", "from peft", "from data"))
    )
    text = text.replace(", think_format_reward]", "]").replace("reward_weights=[1.0, 0.5],", "")
    Path("train.py").write_text(text.replace("use_vllm=True,", "").replace('report_to="wandb",', ""))
    Path("train.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{n} =", "answer": str(n)}) + "\n" for n in range(64))
    )
    assert exit_code(["import", "trl", "train.py"]) == 0
    written = Path("run.toml").read_text()
    assert 'reward = ["train.py:last_number"]' in written
    Path("run.toml").write_text(written + '\n[data]\nsource = ["train.jsonl"]\n')
    model = str(packaged("grpo")[1]["model"])
    assert exit_code(["check", "grpo", "--config", "run.toml", "--model", model]) == 0
    null = ["--backend", "null", "--model", model, "--iterations", "1", "--held-out", "0", "--name", "moved"]
    assert exit_code(["run", "grpo", "--config", "run.toml", *null, "--out", "runs"]) == 0
    lines = [json.loads(line) for line in Path("runs/moved/metrics.jsonl").read_text().splitlines()]
    assert any(line.get("actor.update/steps") == 2 * 8 * 8 / 32 for line in lines)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"loss_type": "vespo"}, "loss_type"),
        (
            {"loss_type": "dapo", "importance_sampling_level": "sequence"},
            "importance_sampling_level",
        ),
        ({"epsilon_high": 0.28}, "epsilon_high"),
        ({"loss_type": "cispo", "epsilon_high": 0.5}, "epsilon_high"),
        ({"delta": 1.5}, "delta"),
        ({"scale_rewards": "batch"}, "scale_rewards"),
        ({"loss_type": "sapo", "scale_rewards": False}, "scale_rewards"),
        ({"loss_type": "sapo", "beta": 0.1}, "beta"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "token_mask"}, "vllm_importance_sampling_mode"),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 4}, "steps_per_generation"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type"),
        ({"fp16": True}, "fp16"),
        ({"mask_truncated_completions": True}, "mask_truncated_completions"),
        ({"entropy_coef": 0.01}, "entropy_coef"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ({"peft_config__r": 8, "peft_config__target_modules": ["up_proj"]}, "peft_config.target_modules"),
        ({"peft_config__lora_dropout": 0.1}, "peft_config.lora_dropout"),
        ({"use_peft": True, "lora_dropout": 0.1}, "lora_dropout"),
        ({"moon_phase": "full"}, "moon_phase"),
    ],
)
def test_keys_that_change_the_computation_are_unsupported_by_name(given, key):
    assert list(imported_from(**given).unsupported) == [key]


@pytest.mark.parametrize(
    ("given", "flow", "flags"),
    [
        ({}, "grpo", {"hp.mean": "tokens", "hp.beta": 0.0, "prompts": 1, "hp.minibatch": 8, "hp.samples": 8}),
        (
            {"loss_type": "grpo", "beta": 0.1},
            "grpo",
            {"hp.mean": "row-tokens", "hp.estimator": "k3-weighted"},
        ),
        ({"use_bias_correction_kl": False}, "grpo", {"hp.estimator": "k3"}),
        (
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon": 3e-4,
                "epsilon_high": 4e-4,
            },
            "gspo",
            {"hp.clip_low": 3e-4, "hp.clip_high": 4e-4},
        ),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", {"hp.ratio_cap": 5.0}),
        ({"loss_type": "sapo", "sapo_temperature_pos": 0.9}, "sapo", {"hp.tau_pos": 0.9, "hp.tau_neg": 1.05}),
        (
            {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 2, "steps_per_generation": 8},
            "grpo",
            {"prompts": 16, "hp.minibatch": 32},
        ),
        ({"generation_batch_size": 64, "num_generations": 4}, "grpo", {"prompts": 16, "hp.minibatch": 8}),
        ({"max_steps": 100, "steps_per_generation": 4, "num_iterations": 2}, "grpo", {"iterations": 13}),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            "grpo",
            {"actor.generator": "vllm", "hp.is_cap": 3.0},
        ),
        ({"peft_config__r": 4, "peft_config__lora_alpha": 8}, "grpo", {"lora": 4, "lora_alpha": 8}),
        ({"use_peft": True, "lora_dropout": 0.0}, "grpo", {"lora": 16, "lora_alpha": 32}),
        (
            {"reward_funcs": ["a.py:f", "math"], "reward_weights": [1.0, 0.5]},
            "grpo",
            {"reward": ["a.py:f", "math:0.5"]},
        ),
        ({"bf16": False}, "grpo", {"dtype": "float32"}),
    ],
)
def test_keys_with_a_counterpart_are_imported(given, flow, flags):
    found = imported_from(**given)
    assert (found.unsupported, found.flow) == ({}, flow)
    assert flags.items() <= found.flags.items()
    hp = load_flow(flow).parameters.hp
    assert {name for name in found.flags if name.startswith("hp.")} <= {f"hp.{name}" for name in vars(hp)}
