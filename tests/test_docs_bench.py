"""docs/bench.md is true: its tables are complete, its suite compiles, its gate works, and its system of four
methods is compared."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from sources import ROOT

from rlflow.benchmarks import by_seed
from rlflow.benchmarks.by_seed import SeedRow
from rlflow.benchmarks.cells import PEERS, compile_cells
from rlflow.benchmarks.past_results import OF_ROWS
from rlflow.benchmarks.report import heads
from rlflow.benchmarks.suite import SHIPPED, Gate, Goal, Settings, Suite, read_suite
from rlflow.cli.main import exit_code
from rlflow.cli.plan import options_of

PAGE = (ROOT / "docs" / "bench.md").read_text()
MINE = """
[suite]
block = 3
rounds = 2
[base]
system = "mine.py"
iterations = 6
[[cell]]
name = "one"
[[cell]]
name = "two"
more = 1
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def rows(header: str) -> list[list[str]]:
    """Return the cells of the rows of the table with this header."""
    table = PAGE[PAGE.index(f"| {header} |") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_the_tables_are_complete() -> None:
    assert sorted(name for row in rows("suite") for name in named(row[0])) == sorted(
        file.stem for file in SHIPPED.glob("*.toml")
    )
    shown = {named(row[0])[0]: row[1] for row in rows("setting")}
    defaults = {name: field.default for name, field in Settings.model_fields.items()}
    words = {name: "none" if value is None else f"{value:g}" for name, value in defaults.items()}
    assert shown == words | {"base": "the first cell"}
    cells, seeds = (re.split(r"  +", block.strip()) for block in blocks("text") if block.startswith("cell"))
    assert cells == list(heads(Suite("x", Settings(), Goal(), (), ())))
    assert seeds == list(
        by_seed.heads(
            [SeedRow("", 0, {f"evaluation/{figure}": (0, 0) for figure in by_seed.FIGURES}, 0, 0, 0)], Goal()
        )
    )
    systems = re.findall(
        r'"(\w+)"', PAGE[PAGE.index("A cell with `system") :].partition('`system = "mine.py"`')[0]
    )
    assert set(systems) == {file.stem for file in PEERS.glob("[!_]*.py")}


@pytest.mark.slow
def test_the_suite_and_the_gate_can_be_read_and_compiled(tmp_path: Path) -> None:
    suite, gate = blocks("toml")
    (tmp_path / "page.toml").write_text(suite + gate)
    page = read_suite(tmp_path / "page.toml")
    assert page.gates == (Gate(metric="seconds", cell="staleness=1"),)
    assert {gate.metric for gate in page.gates} <= set(OF_ROWS)
    assert [cell.cell.name for cell in compile_cells(page, options_of)] == ["staleness=0", "staleness=1"]
    assert (len(page.seeds), page.goal.reach, page.goal.margin) == (5, 0.85, 0.05)


def test_the_commands_exist() -> None:
    lines = [shlex.split(line) for block in blocks("console") for line in block.splitlines()]
    asked = [words[2] for words in lines if words[:2] == ["rlflow", "bench"]]
    assert set(asked) <= {"record", "trust", *(file.stem for file in SHIPPED.glob("*.toml"))}
    assert len(lines) >= 3


def test_the_system_is_compared_and_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(next(block for block in blocks("python") if "class System" in block))
    (tmp_path / "mine.toml").write_text(MINE + blocks("toml")[1].replace("staleness=1", "one"))
    assert exit_code(["bench", "mine.toml", "--json", "--markdown", "table.md"]) == 0
    page = json.loads(capsys.readouterr().out)
    assert [
        (cell["name"], cell["iterations"], cell["seconds"], cell["tokens"]) for cell in page["cells"]
    ] == [("one", 6, 0.5, 64.0), ("two", 6, 0.5, 64.0)]
    assert "passes without history" in page["notes"][0]
    assert (tmp_path / "table.md").read_text().startswith("`rlflow bench mine`")
    assert exit_code(["bench", "trust", "bench/mine"]) == 0
    assert (tmp_path / "bench" / "history.jsonl").is_file()
    assert exit_code(["bench", "mine.toml", "--against", "bench/mine"]) == 0
    assert "so this is not a verdict" in " ".join(capsys.readouterr().out.split())
