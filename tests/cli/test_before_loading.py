"""Wrong flags, models and data are refused before the algorithm's file is loaded."""

import subprocess
import sys

import pytest

from rlflow.cli.before_loading import check_flags
from rlflow.errors import PlanError

WRONG = [
    ["--itrations", "3"],
    ["--iterations", "many"],
    ["--temperature", "0.7"],
    ["--acter.lr", "1"],
    ["--pool", "all=2"],
    ["--model", "no/such/folder"],
    ["--critic.model", "./none", "--model", "."],
    ["--data", "none.jsonl"],
    ["--data", "sums=none.csv:0.5"],
    ["--data", "table.xls"],
    ["--reward", "none.py:f"],
    ["--config", "none.toml"],
]


def test_torch_is_not_imported_for_a_refusal(tmp_path):
    (tmp_path / "table.xls").touch()
    (tmp_path / "config.json").touch()
    program = f"""
import sys
from rlflow.cli.main import exit_code
for words in {WRONG!r}:
    assert exit_code(["run", "ppo", *words]) == 2, words
loaded = {{"torch", "transformers", "datasets", "huggingface_hub", "pyarrow", "rlflow.algorithms.ppo"}} & {{*sys.modules}}
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("  expected: ") == len(WRONG)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"betta": "1"}, r"there is no flag --betta(.|\n)*nearest: +--hp.beta\n"),
        ({"temperature": "1"}, r"nearest: +--actor.generate.temperature\n"),
        ({"itrations": "1"}, r"nearest: +--iterations\n"),
        ({"acter.lr": "1"}, r"nearest: +--actor.lr\n"),
    ],
)
def test_the_suggestions_know_the_flow(words, says):
    with pytest.raises(PlanError, match=says):
        check_flags("ppo", words)


@pytest.mark.parametrize(
    "values",
    [
        {"lr": "1e-5", "actor.generate.temperature": "0.5", "hp.none": "1", "quiet": True},
        {"model": "org/name", "data": ("org/data:main:2", "g=org/other:0.5"), "reward": ("org/judge:0.5",)},
        {"backend": "null", "forward_seconds": "1"},
        {"actor.trainer": "some.module", "its_setting": "1"},
        {"service.judge": "python judge.py", "reward": ("task",)},
    ],
)
def test_what_may_be_right_is_left_to_the_loaded_flow(values):
    check_flags("ppo", values)


def test_a_file_that_cannot_be_outlined_is_checked_by_the_names_of_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("raise RuntimeError('loaded')")
    check_flags("a.py", {"anything": "1", "some.role": "2"})
    with pytest.raises(PlanError, match="'iterations' does not fit"):
        check_flags("a.py", {"iterations": "x"})
