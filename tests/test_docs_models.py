"""docs/models.md is true: its commands run, its flags exist, and its tables are complete."""

import contextlib
import importlib
import io
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from sources import ROOT

from rlflow.backends.local.settings import TrainerSettings
from rlflow.cli.main import exit_code

PAGE = (ROOT / "docs" / "models.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
]
# tests/runs/test_reward_model.py runs the others
OWN = [line for line in COMMANDS if "rlflow run" in line and "--model MODEL" in line]
SHORT = {
    "--prompts": "4",
    "--iterations": "1",
    "--held-out": "2",
    "--hp.samples": "2",
    "--hp.max-tokens": "8",
    "--name": "one",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with MODEL and gsm8k/train.jsonl."""
    root = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "tests" / "runs"))
        small = importlib.import_module("small_models")
    small.make(root / "MODEL", "qwen3", small.CHAT)
    shutil.copytree(ROOT / "tests" / "data" / "gsm8k", root / "gsm8k")
    return root


def shortened(command):
    """Return the command with few and short rows. sft samples nothing, and has no settings for it."""
    words = shlex.split(command)
    short = {name: value for name, value in SHORT.items() if "hp." not in name or "run sft" not in command}
    kept = [word for i, word in enumerate(words) if word not in short and words[i - 1] not in short]
    return [*kept, *(word for pair in short.items() for word in pair)]


@pytest.mark.slow
@pytest.mark.parametrize("command", OWN, ids=lambda command: command.split()[2])
def test_a_command_runs(command, folder, tmp_path, monkeypatch):
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = exit_code(shortened(command)[1:])
    assert code == 0, out.getvalue()
    assert "prompts go through the chat template of MODEL" in out.getvalue()
    row = json.loads(Path("runs/one/metrics.jsonl").read_text().splitlines()[1])  # after the evaluation
    assert row["actor.update/steps"] == 1


def test_the_data_command_shows_the_data(folder, monkeypatch, capsys):
    (command,) = (line for line in COMMANDS if line.startswith("rlflow data"))
    monkeypatch.chdir(folder)
    code, out = exit_code(shlex.split(command)[1:]), capsys.readouterr().out
    assert code == 0, out
    assert "prompts go through the chat template of MODEL" in out
    assert "row 2, gsm8k/train.jsonl:2" in out


def test_the_flags_of_adapters_match_the_trainer():
    own = {name for name in TrainerSettings.__dataclass_fields__ if name.startswith("lora")}
    assert {name.replace("-", "_") for name in re.findall(r"^\| `--(lora[\w-]*)", PAGE, re.MULTILINE)} == own


def test_the_page_has_a_command_of_each_kind():
    assert [line.split()[2] for line in COMMANDS] == [
        "grpo",
        "sft",
        "grpo",
        "gsm8k/train.jsonl",
        "ppo",
        "reward_model",
        "ppo",
    ]
