"""docs/evaluation.md is true: its commands print the shown output, and its tables are complete."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from run_faults import MODEL, write_sums
from sources import ROOT
from test_docs_runs import normal, pattern, run_command

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs" / "evaluation.md").read_text()
JUDGE = (
    "def even(completion):\n    return {'score': float(len(completion) % 2 == 0), 'pred': completion[:1]}\n"
)


def first_column(after: str) -> list[str]:
    """Return the names in the first column of the first table after a heading."""
    table = PAGE[PAGE.index(after) :].partition("| ---")[2].partition("\n\n")[0]
    return [name for row in table.splitlines()[1:] for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_recorded_figures_and_answer_fields_match_the_tables(
    recorded: Path,
) -> None:
    line = json.loads((recorded / "metrics.jsonl").read_text().splitlines()[-1])
    named = {re.sub(r"@\d+", "@n" if "mean" in name else "@k", name) for name in line if name.count("/") == 1}
    assert named <= set(first_column("## What is measured"))
    assert {name.split("/")[1] for name in line if name.count("/") == 2} == {"sums", "hard"}
    row = json.loads((recorded / "evaluations" / "after-000002.jsonl").read_text().splitlines()[-1])
    assert {*row, "source", "answer"} == set(first_column("## What is kept"))
    assert all(f"`{name}`" in PAGE for name in row["greedy"])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the page's run, after its commands ran in order."""
    where = tmp_path_factory.mktemp("page")
    write_sums(where / "train.jsonl")
    write_sums(where / "sums.jsonl", 6)
    (where / "hard.jsonl").write_text("".join(json.dumps({"ask": f"{n} + 99 ="}) + "\n" for n in range(5)))
    (where / "judge.py").write_text(JUDGE)
    (where / "MODEL").symlink_to(MODEL)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        patch.setenv("COLUMNS", "200")
        for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                line, _, shown = part.partition("\n")
                command, _, code = line.partition("  # exits ")
                exit_code, printed = run_command(
                    shlex.join([*shlex.split(command), *(["--threads", "1"] if " run " in command else [])])
                )
                assert exit_code == int(code or 0), f"$ {command}\n{printed}"
                assert re.fullmatch(pattern(shown), normal(printed)), f"$ {command}\n{printed}"
    return where / "runs" / "first"
