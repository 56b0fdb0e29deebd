"""docs/environments.md is true: its commands print the shown output, and its tables are complete."""

from __future__ import annotations

import dataclasses
import re
import shlex
from contextlib import closing
from pathlib import Path

import pytest
from sources import ROOT
from test_docs_runs import normal, pattern, run_command

from rlflow.author.columns import TABLE
from rlflow.author.methods import EPISODE_GIVES
from rlflow.rewards.environments.environment_pool import CAUSES, EnvironmentPool
from rlflow.rewards.environments.environment_source import OWN, read_class
from rlflow.rewards.environments.environment_spec import ADAPTERS, SHIPPED, Bounds, parse_environment

PAGE = (ROOT / "docs" / "environments.md").read_text()


def rows(header: str) -> list[list[str]]:
    """Return the cells of the rows of the table with this header."""
    table = PAGE[PAGE.index(f"| {header} |") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def shown_as(value: object) -> str:
    """Return the default of a limit as the page writes it."""
    return "one for each core" if value is None else f"`{value}`" if isinstance(value, str) else f"{value:g}"


def test_the_tables_are_complete() -> None:
    assert {name.partition("(")[0].partition(" ")[0] for row in rows("method") for name in named(row[0])} == {
        "__init__",
        *OWN,
        "repeatable",
    }
    bounds = {f"--env.{field.name}": field.default for field in dataclasses.fields(Bounds)}
    assert [named(row[0])[0] for row in rows("setting of every environment")] == list(bounds)
    shown = [row[1] for row in rows("setting of every environment")]
    assert shown == [shown_as(value) for value in bounds.values()]
    assert {named(row[0])[0]: row[1] for row in rows("column")} == {
        name: str(TABLE[name].kind) for name in EPISODE_GIVES
    }
    assert tuple(named(row[0])[0] for row in rows("cause")) == CAUSES
    for name, settings, _ in rows("name"):
        assert named(settings) == list(
            parse_environment(named(name)[0], {"corpus": "x"} if "search" in name else {}).source.settings
        )
    assert {named(row[0])[0] for row in rows("name")} == set(SHIPPED)
    adapters = PAGE[PAGE.index("**Of other libraries**") :]
    listed = re.findall(r"^\| `(\w+):\w+` \|(.*?)\|", adapters, re.MULTILINE)
    known = {
        library: set(parse_environment(f"{library}:x", {}).source.settings) - {"id"} for library in ADAPTERS
    }
    assert {library: set(named(settings)) for library, settings in listed} == known


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files."""
    for block in re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        (tmp_path / block[0]).write_text(block[1])
    (tmp_path / "algorithms").symlink_to(ROOT / "algorithms")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_the_classes_of_the_page_are_environments(folder: Path) -> None:
    assert read_class("guess.py", "Guess").scores
    assert len((folder / "search.py").read_text().splitlines()) < 40
    (folder / "docs.jsonl").write_text(
        '{"text": "Lund lies in Sweden."}\n{"text": "Rain falls in Bergen."}\n'
    )
    with closing(
        EnvironmentPool(
            parse_environment("search.py:Search", {"corpus": "docs.jsonl", "topk": "1", "parallel": "1"})
        )
    ) as pool:
        episodes, _ = pool.open([{}], [0])
        (answer,) = pool.step(episodes, ["<search>rain</search>"])
    assert isinstance(answer, dict)
    assert answer["says"] == "<information>Rain falls in Bergen.</information>"
    assert [tool.name for tool in read_class("calculator.py", "Calculator").tools] == ["add"]


@pytest.mark.slow
def test_the_commands_print_the_output_on_the_page(folder: Path) -> None:
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            command, _, code = line.partition("  # exits ")
            exit_code, printed = run_command(
                shlex.join([*shlex.split(command), *(["--threads", "1"] if " run " in command else [])])
            )
            assert exit_code == int(code or 0), f"$ {command}\n{printed}"
            assert re.fullmatch(pattern(shown), normal(printed)), f"$ {command}\n{printed}"
