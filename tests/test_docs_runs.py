"""docs/runs.md is true: its commands print the shown output, and its tables are complete."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import ROOT

from rlflow.author.load import load
from rlflow.cli.main import exit_code
from rlflow.config.options import Options
from rlflow.execution import row_figures
from rlflow.runs.bounds import RunTotals
from rlflow.runs.resume import MAY_CHANGE

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "runs.md").read_text()
JUDGE = "def fussy(completion):\n    return 1.0 / (len(completion) % 2)\n"


def commands() -> Iterator[tuple[str, int, str]]:
    """Return (command, exit code, output on the page) in the order of the page; the commands build on one
    another."""
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            command, _, code = line.partition("  # exits ")
            yield command, int(code or 0), shown


def run_command(command: str) -> tuple[int, str]:
    """Run a line in this process; return its exit code and output."""
    words = shlex.split(command)
    if words[0] == "sed":
        expression, file = words[2:]
        _, old, new, _ = expression.split("/")
        Path(file).write_text(Path(file).read_text().replace(old, new))
        load.cache_clear()  # a file is loaded once per process
        return 0, ""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        return exit_code(words[1:]), out.getvalue()


def normal(text: str) -> str:
    """Return the text without times and without spaces at line ends."""
    timeless = re.sub(
        r"\b(\d+\.\d+ s|\d+ ms|\d+ s) ago|_ ago", "_ ago", re.sub(r"in \d+\.\d+ s\b", "in _ s", text)
    )
    return "".join(line.rstrip() + "\n" for line in timeless.splitlines())


def pattern(shown: str) -> str:
    """Return a pattern: a line with only `…` matches any lines; `…` within a line matches any text."""
    lines = [
        r"(?:.*\n)*" if line == "…" else re.escape(line).replace("…", ".*") + r"\n"
        for line in normal(shown).splitlines()
    ]
    return "".join(lines)


def test_the_commands_print_the_output_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copy(ROOT / "algorithms" / "grpo.py", "mine.py")
    Path("judge.py").write_text(JUDGE)
    for command, code, shown in commands():
        found, printed = run_command(command)
        assert found == code, f"$ {command}\n{printed}"
        assert re.fullmatch(pattern(shown), normal(printed)), f"$ {command}\n{printed}"


def first_column(after: str) -> list[str]:
    """Return the names in the first column of the first table after a text."""
    table = PAGE[PAGE.index(after) :].partition("| ---")[2].partition("\n\n")[0]
    return [name for row in table.splitlines()[1:] for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_the_table_of_metrics_matches_the_source() -> None:
    named = re.findall(r"\b(?:policy|critic|reward|response)/\w+", row_figures.__doc__ or "")
    assert first_column("These are in every iteration's metrics") == named


def test_the_table_of_bounds_matches_the_source() -> None:
    assert set(first_column("`--json` has the same under `bounds`")) == set(RunTotals().as_json())


def test_the_table_of_files_matches_a_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (
        "run grpo --backend null --prompts 4 --hp.samples 2 --iterations 1 --name one",
        "resume runs/one --iterations 2",
    ):
        assert run_command(f"rlflow {command}")[0] == 0
    left = {path.name for path in (tmp_path / "runs" / "one").iterdir()}
    listed = {name.partition("/")[0] for name in first_column("## What a run directory holds")}
    # if rewards print; with models, pools, services
    elsewhere = {"rewards.txt", "evaluations", "traffic.jsonl", "services", "services.json"}
    elsewhere |= {"proof.txt", "proof.json"}  # in runs of ten iterations or more
    assert left - {"timeline-1.json"} == listed - elsewhere


def test_the_changeable_settings_and_defaults_match_the_source() -> None:
    text = PAGE[PAGE.index("These may change:") :].partition("and the deadlines")[0]
    assert tuple(name.replace("-", "_") for name in re.findall(r"--([\w-]+)", text)) == MAY_CHANGE
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    assert (defaults["reward_timeout"], defaults["max_missing"], defaults["max_bad"]) == (60.0, 0.5, 3)
