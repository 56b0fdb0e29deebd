"""docs/services.md is true: its commands print the shown output, its tables are complete, and its example is
the shipped one."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from sources import ROOT
from test_docs_runs import normal, pattern, run_command

from rlflow.cli.serve import app
from rlflow.processes.declare import ServiceSettings

PAGE = (ROOT / "docs" / "services.md").read_text()


def rows(header: str) -> list[list[str]]:
    """Return the cells of the rows of the table with this header."""
    table = PAGE[PAGE.index(f"| {header} |") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def test_the_tables_are_complete() -> None:
    settings = {field.name: field.default for field in dataclasses.fields(ServiceSettings)}
    shown = {row[0].strip("`"): row[1].strip("`") for row in rows("setting | default")}
    assert shown == {
        name: "none" if value in ("", None) else f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in settings.items()
    }
    commands = [command.callback.__name__ for command in app.registered_commands if command.callback]
    assert [row[0].strip("`").split()[2] for row in rows("command | endpoint")] == commands


def test_the_example_is_the_shipped_one() -> None:
    shown = re.search(r"```toml\n# examples/search/run.toml\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None
    assert (ROOT / "examples" / "search" / "run.toml").read_text().partition("\n")[2] == shown[1]


@pytest.mark.slow
def test_the_commands_print_the_output_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("examples", "rlflow"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            command, _, code = line.partition("  # exits ")
            found, printed = run_command(command + (" --threads 1" if " run " in command else ""))
            assert found == int(code or 0), f"$ {command}\n{printed}"
            assert re.fullmatch(pattern(shown), normal(printed)), f"$ {command}\n{printed}"
