"""Rows from follow-up prompts, selected and joined rows end on pools as in one process, also ahead of
training and after a resume."""

import json
import shutil
from pathlib import Path

import pytest
from planned import planned_as  # noqa: F401, a fixture
from sources import TESTS

import rlflow
from rlflow.checkpoints.reading import load_latest
from rlflow.monitoring.reporter import Quiet
from rlflow.runs import resume

FLOWS = TESTS / "execution" / "lineage.py"
EMA = f"{FLOWS.with_name('ema.py')}::ema"
SMALL = {"prompts": 6, "iterations": 3, "threads": 1, "backend": "null", "save_every": 0, "held_out": 40}
DYING = Path(__file__).with_name("dying.py")
TIMES = ("seconds", "response/tokens_per_second")


def reported(folder):
    """Return the metrics without times, and the row accounting of each iteration."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    outcomes = [json.loads(line) for line in (folder / "fates.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines], outcomes


def run(name, folder, **keywords):
    return reported(
        rlflow.run(name if "::" in name else f"{FLOWS}::{name}", out=str(folder), **SMALL | keywords).folder
    )


APART = "train=1@threads,rollout=1@threads"
PLACES = [
    ("marked", "all=4@threads", 1),
    ("correction", "all=2@threads", 1),
    ("taught", "all=2@threads", 1),
    ("demonstrated", "all=2@threads", 1),
    ("demonstrated", "train=1@threads,rollout=2@threads", 1),
    ("critique", "train=2@threads,rollout=1@threads", 1),
    (EMA, "all=2@threads", 1),
    ("vine", APART, 3),
]


@pytest.mark.parametrize(("name", "pools", "chunks"), PLACES)
def test_pools_end_like_one_process(tmp_path, name, pools, chunks):
    """This also holds for streamed rows: in `vine`, the rows that continue from truncated ones."""
    there = run(name, tmp_path / "there", pools=pools, stream=chunks)
    assert_alike(there, run(name, tmp_path / "here"))


def assert_alike(there, here):
    """Check that accounting and metrics are equal, except for the rounding of sums over ranks."""
    assert there[1] == here[1]
    for line, other in zip(there[0], here[0], strict=True):
        assert line == other | {
            name: pytest.approx(value, rel=1e-12) for name, value in other.items() if name.endswith("/loss")
        }


AHEAD = {"pools": APART, "staleness": 1, "iterations": 4, "save_every": 2}


@pytest.mark.parametrize(
    ("name", "settings"), [("harder", {}), ("vine", {}), ("reviewed", {}), (EMA, {"hp.controlled": False})]
)
def test_a_run_ahead_of_training_resumes_after_a_kill(tmp_path, name, settings):
    run(name, tmp_path / "runs", **AHEAD, **settings)
    (folder,) = (tmp_path / "runs").iterdir()
    lines, outcomes = reported(folder)
    assert len(outcomes) == 4
    # as if it had been killed after the checkpoint of iteration 2
    for newer in (folder / "checkpoints").glob("step-*4"):
        newer.rename(tmp_path / "gone")
    (folder / "checkpoints" / "latest").unlink(missing_ok=True)
    (folder / "final").rename(tmp_path / "final")
    assert any(file.startswith("queue/") for file in load_latest(folder).snapshot.files)
    resume.resume(folder, {}, Quiet())
    assert reported(folder) == (lines, outcomes)


FAULTS = {"critique": {"generate of verifier, 1": [1]}, "vine": {"cut, 1": [1]}}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["critique", pytest.param("vine", marks=pytest.mark.long)])
def test_rows_of_repeated_iterations_are_counted_once(tmp_path, ray_address, name):
    shutil.copy(DYING, tmp_path)
    (tmp_path / "fault.json").write_text(json.dumps(FAULTS[name]))
    file = tmp_path / "lineage.py"
    file.write_text(
        FLOWS.read_text()
        + "\n\nimport dying  # counts the calls of workers, and kills them at those that fault.json names\n"
    )
    small = SMALL | {"reward_write": ("/",), "heartbeat": 15.0}
    died = reported(
        rlflow.run(
            f"{file}::{name}", out=str(tmp_path / "died"), pools="all=2", ray_address=ray_address, **small
        ).folder
    )
    assert all((tmp_path / f"{place}.calls").exists() for place in FAULTS[name])
    (tmp_path / "fault.json").write_text("{}")
    assert_alike(
        died,
        reported(
            rlflow.run(f"{file}::{name}", out=str(tmp_path / "whole"), **small | {"heartbeat": 0.0}).folder
        ),
    )


SHIPPED = ["debate", "selfplay", "vapo", "vineppo"]
TRIAL = TESTS / "trial"
OWN = {"duel": TRIAL / "duel.py", "curriculum": TRIAL / "curriculum.py"}
OWN_SETTINGS = {
    "vineppo": {"hp.step": 2},
    "vapo": {"hp.warmup": 1},
    "curriculum": {"hp.high": 0.0, "hp.low": 0.0},
}
FEW = {"hp.samples": 2, "hp.max_tokens": 6, "hp.minibatch": 5}


# the forms of other algorithms are those of the flows above
@pytest.mark.parametrize("name", ["selfplay", "vapo", "vineppo", *OWN])
def test_an_algorithm_on_pools_ends_like_in_one_process(tmp_path, name):
    keywords = SMALL | {"iterations": 2} | FEW | OWN_SETTINGS.get(name, {})
    one, pools = (
        reported(rlflow.run(str(OWN.get(name, name)), out=str(tmp_path / place), **keywords | more).folder)
        for place, more in (("one", {}), ("pools", {"pools": "all=2@threads"}))
    )
    assert_alike(pools, one)


@pytest.mark.parametrize("name", SHIPPED)
def test_an_algorithm_with_follow_up_prompts_can_run_ahead(planned_as, name):  # noqa: F811
    assert planned_as(f"{name} --pools train=1,rollout=1 --staleness 1").placement.pools == {
        "train": 1,
        "rollout": 1,
    }
