"""docs/jobs.md is true: its script prints the shown output on a real Ray, and its commands do what the page
describes."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import ppo_by_hand
import pytest
from sources import ROOT

from rlflow.cli.main import exit_code

PAGE = (ROOT / "docs" / "jobs.md").read_text()
(SCRIPT,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(PRINTS,) = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(
    r"^(rlflow .*)$", "\n".join(re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)), re.MULTILINE
)


@pytest.mark.long
def test_the_script_prints_the_output_on_the_page(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == PRINTS


def test_the_description_of_an_unstarted_job_matches_the_page():
    names = {"__name__": "page"}
    exec(compile(SCRIPT, "jobs.md", "exec"), names)
    job = names["Job"]("mine", env={"LEVEL": "1"})
    actor, critic = (job.role(name, names["Scorer"], ranks=2, cpus=0.5) for name in ("actor", "critic"))
    job.collocate(actor, critic)
    assert PRINTS.startswith(f"{job}\n")


@pytest.mark.parametrize("command", [command for command in COMMANDS if " run " not in command])
def test_commands_of_the_page_print_and_start_nothing(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command.partition(" > ")[0])[1:]
    assert exit_code(words) == 0
    said = capsys.readouterr().out
    expected = {
        "plan": "0.5 by train, 0.5 by rollout",
        "slurm": "#SBATCH --requeue",
        "skypilot": "execution: parallel",
        "kuberay": "kind: RayJob",
        "ray": "ray job submit",
    }
    assert expected[words[0] if words[0] == "plan" else words[words.index("--for") + 1]] in said


def test_the_example_is_as_long_as_the_page_says():
    lines = len(Path(ppo_by_hand.__file__).read_text().splitlines())
    assert f"in {lines} lines" in PAGE
    assert lines < 140
