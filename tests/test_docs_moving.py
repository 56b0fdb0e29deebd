"""docs/moving.md is true: its examples for verl, OpenRLHF and rlflow run on the packaged model, and the run
reports what the page says."""

import json
import re
import shlex
import shutil

import pytest
from sources import ROOT, TASKS
from test_docs_runs import normal, pattern, run_command

from rlflow.cli.main import exit_code
from rlflow.config.options import Options
from rlflow.rewards import RewardPool, bind, parse_reward

PAGE = (ROOT / "docs" / "moving.md").read_text()
COMMANDS = re.findall(r"^\$ (rlflow run .*)$", PAGE, re.MULTILINE)
VERL = """
import re

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "openai/gsm8k" and extra_info["split"] == "train", extra_info
    numbers = re.findall(r"-?[0-9]+", solution_str.replace(",", ""))
    return {"score": float(numbers[-1:] == [ground_truth]), "answered": bool(numbers)}
"""
OPENRLHF = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    rewards = torch.tensor([float(query[len(prompt):].strip() == label) for query, prompt, label in zip(queries, prompts, labels)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"accuracy": rewards.mean()}}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Sums as records of both projects, and rewards of both forms."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    sums = [(f"{i % 10}+{i // 10}=", str(i % 10 + i // 10)) for i in range(80)]
    parquet.write_table(
        pyarrow.Table.from_pylist(
            [
                {
                    "data_source": "openai/gsm8k",
                    "prompt": [{"role": "user", "content": question}],
                    "ability": "math",
                    "reward_model": {"style": "rule", "ground_truth": answer},
                    "extra_info": {"split": "train", "index": i},
                }
                for i, (question, answer) in enumerate(sums)
            ]
        ),
        tmp_path / "train.parquet",
    )
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"input": a, "label": b}) + "\n" for a, b in sums)
    )
    (tmp_path / "gsm8k.py").write_text(VERL)
    (tmp_path / "reward_func.py").write_text(OPENRLHF)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command, capsys, *more):
    words = shlex.split(command)[1:]
    code = exit_code(
        [
            *words,
            "--held-out",
            "8",
            "--hp.samples",
            "4",
            "--hp.max_tokens",
            "8",
            "--prompts",
            "8",
            "--seed",
            "1",
            *more,
        ]
    )
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_the_page_has_a_command_for_each_form():
    assert [shlex.split(command)[shlex.split(command).index("--reward") + 1] for command in COMMANDS] == [
        "gsm8k.py:compute_score",
        "reward_func.py:reward_func",
        "http://127.0.0.1:5000/get_reward",
        "rewards.py:accuracy",
    ]


def test_the_flags_of_rlflow_exist():
    column = [
        line.split("|")[5] for line in PAGE.splitlines() if line.startswith("| ") and line.count("|") == 6
    ]
    flags = {
        flag.replace("-", "_") for cell in column for flag in re.findall(r"--([a-z-]+)(?![.a-z-])", cell)
    }
    assert flags >= {"data", "reward", "prompts"}
    assert flags <= Options.__dataclass_fields__.keys()


def test_the_reward_for_trl_on_the_page_works_unchanged(tmp_path):
    (trl,) = re.findall(r"```python\n# TRL\n(.*?)```", PAGE, re.DOTALL)
    scope = {}
    exec(trl, scope)
    (tmp_path / "rewards.py").write_text(trl)
    from rlflow import Batch

    completions, answers = ["1", " 2 ", "x"], ["1", "2", "3"]
    batch = Batch.of(prompt=["p"] * 3, completion=completions, answer=answers)
    with RewardPool(1) as pool:
        (reward,) = bind([parse_reward(f"{tmp_path}/rewards.py:accuracy")], pool)
        found = reward.score(batch).values.tolist()
    assert found == scope["accuracy"](completions, answers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "logged"), [(COMMANDS[0], "compute_score_answered"), (COMMANDS[1], "reward_func_accuracy")]
)
def test_data_and_rewards_of_other_projects_run_on_the_packaged_model(folder, capsys, command, logged):
    model = TASKS / "arithmetic_model"
    code, said = run(command.replace("MODEL", str(model)), capsys, "--iterations", "2", "--name", "moved")
    assert code == 0, said
    if "parquet" in command:
        for line in re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[0].splitlines():
            assert line in " ".join(said.split()) or line in said
    metrics = [
        json.loads(line) for line in (folder / "runs" / "moved" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(f"reward/{logged}" in line for line in metrics if "reward/mean" in line)
    assert any(line.get("reward/mean", 0) > 0 for line in metrics)


def test_imported_settings_match_the_page(tmp_path, monkeypatch):
    script = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo "
        "actor_rollout_ref.rollout.name=vllm \\\n"
    )
    script += "  actor_rollout_ref.rollout.n=5 data.train_batch_size=64 trainer.n_gpus_per_node=8"
    (tmp_path / "grpo.sh").write_text(script.replace("trainer.n_gpus", "+trainer.n_gpus"))
    (tmp_path / "entropy.sh").write_text(script + " actor_rollout_ref.actor.entropy_coeff=0.001\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    fixtures = ROOT / "tests" / "cli" / "importers" / "fixtures"
    shutil.copy(fixtures / "trl-1.16.0-readme.py.txt", "train.py")
    shutil.copy(fixtures / "trl-grpo.yaml", "grpo.yaml")
    blocks = re.findall(r"^```console\n(\$ rlflow import.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for part in re.split(r"^\$ ", "".join(blocks), flags=re.MULTILINE)[1:]:
        line, _, shown = part.partition("\n")
        command, _, code = line.partition("  # exits ")
        exit_code, printed = run_command(command)
        assert exit_code == int(code or 0), f"$ {command}\n{printed}"
        assert re.fullmatch(pattern(shown), normal(printed)), f"$ {command}\n{printed}"
