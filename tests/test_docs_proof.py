"""docs/proof.md is true: its commands print the shown output, and its table has every claim."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path

import pytest
from planted import BACKENDS, FILES
from sources import ROOT
from test_docs_runs import normal, pattern, run_command

from rlflow.runs.proof import flow_claims, reward_claims, sampler_claims, score_claims, weights_claims

MODULES = (flow_claims, reward_claims, sampler_claims, score_claims, weights_claims)
PAGE = (ROOT / "docs" / "proof.md").read_text()


@pytest.mark.slow
def test_the_commands_print_the_output_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "algorithms" / "grpo.py", "mine.py")
    shutil.copy(ROOT / "benchmarks" / "silent_rewards.py", ".")
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = part.partition("\n")
            command, _, code = line.partition("  # exits ")
            ended, printed = run_command(command)
            assert ended == int(code or 0), f"$ {command}\n{printed}"
            assert re.fullmatch(pattern(shown), normal(printed)), f"$ {command}\n{printed}"


def test_the_table_has_every_claim() -> None:
    names = set(re.findall(r'(?:judged|Claim)\("([a-z-]+)"', "".join(map(inspect.getsource, MODULES))))
    rows = PAGE.partition("| --- |")[2].partition("\n\n")[0]
    assert (
        names - {"rehearsed", "weights"}
        == {name for row in rows.splitlines() for name in re.findall(r"`([a-z-]+)`", row[:90])} & names
    )


def test_the_page_counts_the_planted_faults() -> None:
    assert f"has {len(FILES) + len(BACKENDS)} faults" in PAGE
    assert len(FILES) + len(BACKENDS) >= 25
