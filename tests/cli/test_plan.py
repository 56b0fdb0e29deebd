"""`rlflow plan` from a user's view."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT, TESTS

from rlflow import PlanError
from rlflow.cli.main import exit_code
from rlflow.cli.plan import shared_devices

NULL = ["--backend", "null"]
LINEAGE = TESTS / "execution" / "lineage.py"
GOLDEN = Path(__file__).parent / "golden"
TEXTS = {
    "pools": "ppo --prompts 8 --batch_tokens 1024 --memory 20MB --pools train=1,rollout=1 --device cpu",
    "turns": "grpo --prompts 8 --batch_tokens 1024 --memory 16MB --device cpu",
    "ahead": "dapo --prompts 8 --device cpu --dtype bfloat16 --pools train=2,rollout=1 --staleness 1",
    "asked": f"{LINEAGE}::vine --prompts 6 --backend null --pools all=2 --commit-every 3",
}
WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
from rlflow.cli.main import main
sys.argv = ["rlflow", "plan", "ppo", "--pools", "train=4,rollout=4", "--backend", "null"]
main()
"""


@pytest.fixture
def called(capsys):
    """Run `rlflow plan`; return exit code, output and errors."""

    def call(*words):
        return exit_code(["plan", *words]), *capsys.readouterr()

    return call


def test_every_section_is_printed(called):
    code, out, err = called("ppo", *NULL, "--pools", "train=4,rollout=4")
    assert (code, err) == (0, "")
    titles = [line for line in out.splitlines() if re.match(r"[a-z]", line)]
    assert titles == [
        "flow ppo: 64 prompts, 64 rows an iteration; pools train (4 ranks), rollout (4 ranks)",
        "nodes",
        "columns",
        "weights",
        "at the same time",
        "passes",
        "time, in units of the default costs",
        "assumed",
    ]
    assert "\x1b" not in out


@pytest.mark.parametrize("name", TEXTS)
def test_a_plan_is_printed_to_its_golden_text(called, name):
    """RLFLOW_WRITE_GOLDEN=1 writes the golden texts anew; read the difference."""
    code, out, err = called(*TEXTS[name].split())
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("RLFLOW_WRITE_GOLDEN"):
        path.write_text(out)
    assert (code, err, out) == (0, "", path.read_text())


def test_the_keys_of_the_json_match_the_page(called):
    code, out, _ = called("ppo", *NULL, "--pools", "train=4,rollout=4", "--json", "--prompts", "2")
    found = json.loads(out)
    page = (ROOT / "docs" / "runs.md").read_text()
    table = page[page.index("`--json` prints one object:") :].partition("| ---")[2].partition("\n\n")[0]
    assert code == 0
    assert list(found) == [
        name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", row.split(" | ")[0])
    ]
    assert found["roles"]["actor"] == {"trainer": "train", "generator": "rollout"}
    assert {warning["code"] for warning in found["warnings"]} == {"idle-ranks"}
    assert found["time"]["costs"]["generate"] == 10.0


def test_an_impossible_plan_exits_with_2_and_prints_only_the_error(called):
    code, out, err = called("grpo", *NULL, "--pools", "all=2", "--staleness", "1")
    assert (code, out) == (2, "")
    assert "alternate on pool 'all'" in err


def test_settings_of_a_file_are_used(called, tmp_path):
    (tmp_path / "run.toml").write_text('backend = "null"\nprompts = 5\n[pools]\ntrain = 1\nrollout = 1\n')
    _, out, _ = called("grpo", "--config", str(tmp_path / "run.toml"), "--prompts", "6")
    assert out.startswith(
        "flow grpo: 6 prompts, 48 rows an iteration; pools train (1 rank), rollout (1 rank)\n"
    )


def test_a_model_that_a_run_would_refuse_is_refused(called):
    assert (
        "there is no model folder 'nowhere'" in called("ppo", "--model", "nowhere", "--data", "chain_sum")[2]
    )
    assert "role 'actor' has no model" in called("ppo", "--data", "chain_sum")[2]


@pytest.mark.slow
def test_a_plan_needs_no_ray(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "by minibatch" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_follow_up_rows_are_counted_along_their_history(called):
    _, out, _ = called(f"{LINEAGE}::critique", *NULL, "--prompts", "6")
    section = out.partition("rows of an iteration, at most\n")[2].partition("\n\n")[0]
    assert section.splitlines() == [
        "  choose: 6",
        "  solver.generate: 24 in 6 groups",
        "  ask: 24",
        "  verifier.generate: 48 in 24 groups",
    ]
    _, out, _ = called(f"{LINEAGE}::vine", *NULL, "--prompts", "6", "--json")
    assert [(each["node"], each["rows"], each["known"]) for each in json.loads(out)["lineage"]] == [
        ("actor.generate", 12, True),
        ("ask", 12, False),
        ("actor.generate#2", 36, False),
    ]


def test_a_plan_shows_shared_devices_and_overlapping_nodes(planned_as):
    explained = planned_as(
        "ppo --pools a=2@cpu0.5,b=2@cpu0.25 --actor.pool a --reference.pool a --critic.pool b --device cpu"
    )
    assert explained.as_json()["devices"] == [{"devices": 2, "parts": {"a": 0.5, "b": 0.25}}]
    assert list(shared_devices(explained)) == [
        (
            "pools share 2 devices: 0.5 by a, 0.25 by b; 0.25 of each is unused; ranks with the same number "
            "run on one device, and their nodes overlap"
        )
    ]
    assert any(
        {pair.first, pair.second} == {"actor.logprobs", "critic.values"} and pair.lane is None
        for pair in explained.pairs
    )
    with pytest.raises(PlanError, match="--pools shares a gpu and the ranks compute on a cpu"):
        planned_as(
            "ppo --pools a=2@gpu0.5,b=2@gpu0.5 --actor.pool a --critic.pool b --reference.pool a --device cpu"
        )
