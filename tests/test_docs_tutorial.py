"""docs/tutorial.md is true: its files are written and its commands run, in order, with few and short rows.
Figures of runs are not compared, because fewer rows give other figures; all other words are."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from sources import ROOT
from test_docs_runs import normal, pattern, run_command

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "tutorial.md").read_text()
LEARN = "rlflow run algorithms/ppo.py --iterations 10 --prompts 16 --held-out 8"
SHORT = {"prompts = 32": "prompts = 4", "held_out = 200": "held_out = 8"}


def without_figures(text: str) -> str:
    """Return a shown text with `…` for each number and for the spaces that depend on the number's width."""
    return re.sub(r" *[-+]?\d[\d.,]*(?:e-\d+)?(?:%| points)? *", "…", text)


def parts() -> list[tuple[str, str]]:
    """Return ("write", file and text) or ("run", command and output on the page) for each part, in the order
    of the page."""
    found = []
    for language, text in re.findall(
        r"^```(python|toml|console)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
    ):
        if language == "console":
            found += [("run", part) for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
        else:
            found.append(("write", text))
    return found


def test_the_files_and_commands_match_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "algorithms").symlink_to(ROOT / "algorithms")
    for kind, text in parts():
        head, _, shown = text.partition("\n")
        if kind == "write":
            for long, short in SHORT.items():
                text = text.replace(long, short)
            Path(head.removeprefix("# ")).write_text(text)
            continue
        command, _, code = head.partition("  # exits ")
        if command.startswith("python "):
            runpy.run_path(shlex.split(command)[1])
            continue
        found, printed = run_command(LEARN if command == "make learn" else command)
        assert found == int(code or 0), f"$ {command}\n{printed}"
        exact = command.startswith("rlflow check")  # prints line numbers, and no figure of a run
        expected = pattern(shown if exact else without_figures(shown))
        assert re.fullmatch(expected, normal(printed)), f"$ {command}\n{printed}"
