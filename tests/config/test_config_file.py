"""A mistake in a configuration file is reported with the file and the line."""

from pathlib import Path

import pytest

from rlflow.cli.main import exit_code
from rlflow.config.config_file import located, places
from rlflow.errors import Place, Problem

TOML = """\
prompts = 4  # a comment
"iterations" = 2
data-seed = 1
hp.clip = 0.2
[actor]
trainer.lr = 1e-5
generate = { temperature = 1.0 }
[ service . judge ]
wait = 30
"""


def test_each_key_has_its_line(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    lines = {name: place.line for name, place in places(path).items()}
    assert lines == {
        "prompts": 1,
        "iterations": 2,
        "data_seed": 3,
        "hp.clip": 4,
        "actor.trainer.lr": 6,
        "actor.generate": 7,
        "service.judge.wait": 9,
    }
    assert places(tmp_path / "none.toml") == places(None) == {}


def test_a_problem_gets_the_line_of_its_setting_unless_a_flag_sets_it(tmp_path):
    path, mine = tmp_path / "run.toml", Place("mine.py", 7)
    path.write_text(TOML)
    problems = (
        Problem("a", "a", setting="actor.generate.temperature"),
        Problem("b", "b", mine, setting="prompts"),
        Problem("c", "c", setting="hp.clip"),
        Problem("d", "d", setting="hp.beta"),
        Problem("e", "e"),
    )
    for words in (["--config", str(path), "--hp.clip", "1"], [f"--config={path}", "--hp.clip=1"]):
        one, two, *others = located(problems, words)
        assert one.place == Place(str(path), 7)
        assert (two.place, two.definition) == (mine, Place(str(path), 1))
        assert tuple(others) == problems[2:]
    assert located(problems, ["--prompts", "1"]) == problems


@pytest.mark.parametrize(
    ("toml", "line", "says"),
    [
        ("[hp]\nbetaa = 1", 2, "there is no setting 'hp.betaa'"),
        ('prompts = "many"', 1, "the setting 'prompts' does not fit"),
        ("[actor]\nlearning = 1", 2, "role 'actor' has no setting 'learning'"),
        ('[actor]\nlr = "fast"', 2, "the setting 'actor.lr' does not fit"),
        ("modle = 1", 1, "there is no flag --modle"),
        ("[acter]\nlr = 1", 2, "--acter.lr names nothing"),
        ("[actor.generate]\ntop-q = 1", 2, "--actor.generate.top_q is not a setting"),
        ("[hp]\nclip = -1", 2, "the setting 'hp.clip' does not fit"),
        ("[data]\nmax_prompt = 0", 2, "the setting 'data.max_prompt' does not fit"),
    ],
)
def test_a_command_names_the_file_of_a_wrong_key(tmp_path, monkeypatch, capsys, toml, line, says):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(toml)
    assert exit_code(["check", "grpo", "--config", "run.toml"]) == 2
    printed = "".join(capsys.readouterr())
    assert f"run.toml:{line}: {says}" in printed
