"""docs/explain.md is true: its commands print the shown output, and its tables have the recorded figures and
the rules."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from keyed import figures
from sources import ROOT
from test_docs_runs import normal, pattern, run_command

from rlflow.monitoring.diagnosis.rules import RULES
from rlflow.monitoring.funnel import funnel_lines
from rlflow.runs import outcomes
from rlflow.training import learning

PAGE = (ROOT / "docs" / "explain.md").read_text()


def rows(after: str) -> list[list[str]]:
    """Return the cells of the first table after a text."""
    table = PAGE[PAGE.index(after) :].partition("| ---")[2].partition("\n\n")[0]
    return [re.split(r" ?(?<!\\)\| ?", row)[1:-1] for row in table.splitlines()[1:]]


def test_the_table_of_findings_matches_the_rules() -> None:
    found = [(cells[0].strip("`"), cells[1]) for cells in rows("## `rlflow explain RUN`")]
    assert found == [(rule.name, "alarm" if rule.alarm else "advice") for rule in RULES]


def test_the_tables_of_the_funnel_match_the_source() -> None:
    of_rows = [cells[0].strip("`") for cells in rows("## The funnel")]
    assert of_rows == re.findall(r"^    (funnel/rows_\w+) ", outcomes.__doc__ or "", re.MULTILINE)
    of_tokens = re.findall(
        r"`(?:ROLE\.update/|…)([^`]+)`",
        " ".join(cells[0] for cells in rows("| metric | tokens |")),
    )
    named = re.findall(r"^    (funnel/\w+) ", learning.token_funnel.__doc__ or "", re.MULTILINE)
    assert [name for name in of_tokens if not name.startswith("_")] == named


@pytest.mark.slow
def test_the_commands_and_tables_match_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, shown = part.partition("\n")
            code, printed = run_command(
                shlex.join([*shlex.split(command), *(["--threads", "1"] if " run " in command else [])])
            )
            assert code == 0, f"$ {command}\n{printed}"
            assert re.fullmatch(pattern(shown), normal(printed)), f"$ {command}\n{printed}"
    line = json.loads((tmp_path / "runs" / "short" / "metrics.jsonl").read_text().splitlines()[-1])
    recorded = {re.sub(r"^\w+\.update/", "", name) for name in line if "funnel/" in name}
    assert recorded == {*re.findall(r"funnel/\w+", PAGE), "funnel/tokens_clipped_below"} - {
        "funnel/rows_kept",
        "funnel/rows_",
    }
    assert (
        len(funnel_lines(figures({name: value for name, value in line.items() if name != "iteration"}))) == 2
    )
    assert (
        "of the responses are cut at max_tokens; for details: rlflow explain runs/short"
        in run_command("rlflow show short")[1]
    )
