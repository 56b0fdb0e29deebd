"""`--resume auto`: the same command starts a run, resumes it, or does nothing if the run is done."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

import rlflow
from rlflow import PlanError
from rlflow.checkpoints.lock import Lock
from rlflow.cli.run import run_file
from rlflow.errors import RunHeld

pytestmark = pytest.mark.slow

SMALL = {
    "backend": "null",
    "prompts": 2,
    "held_out": 0,
    "threads": 1,
    "save_every": 1,
    "name": "mine",
    "resume": "auto",
    "hp.samples": 2,
}


def again(tmp_path, flow="grpo", **changes):
    return rlflow.run(flow, out=str(tmp_path), **{"iterations": 2, **SMALL, **changes})


def iterations(folder):
    return [json.loads(line)["iteration"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def short_run(tmp_path):
    """The folder of a run of two iterations."""
    return again(tmp_path).folder


def test_the_same_command_starts_resumes_and_then_does_nothing(tmp_path, short_run, capsys):
    with pytest.raises(PlanError) as done:
        again(tmp_path)
    assert [problem.code for problem in done.value.problems] == ["resume-done"]
    words = [
        word
        for name, value in {**SMALL, "iterations": 2, "out": tmp_path}.items()
        for word in (f"--{name}", str(value))
    ]
    assert run_file("grpo", words, str) == 0  # as flags, whose values are text
    assert "has finished all its iterations" in capsys.readouterr().out
    assert again(tmp_path, iterations=3).folder == short_run
    assert iterations(short_run) == [0, 1, 2]


def test_a_run_killed_before_a_checkpoint_starts_again(tmp_path, short_run):
    shutil.rmtree(short_run / "checkpoints")
    shutil.rmtree(short_run / "final")
    assert again(tmp_path).folder == short_run
    assert iterations(short_run) == [0, 1]
    assert (short_run / "final").is_dir()


def test_a_different_run_under_the_same_name_is_refused(tmp_path, short_run):
    for changes, told in (
        ({"hp.samples": 4}, "hp.samples"),
        ({"flow": "rloo"}, "another algorithm"),
        ({"seed": 1}, "--seed"),
    ):
        with pytest.raises(PlanError, match=told):
            again(tmp_path, **changes)
    with pytest.raises(PlanError, match="was started with --seed"):
        again(tmp_path, name="seeded", seed=1) and again(tmp_path, name="seeded")
    with pytest.raises(PlanError, match="no --name"):
        again(tmp_path, name=None)


def test_only_one_of_two_concurrent_commands_runs(tmp_path, short_run):
    with Lock(short_run), pytest.raises(RunHeld):
        again(tmp_path, iterations=3)

    def outcome(_):
        try:
            return again(tmp_path, name="both").folder.name
        except (PlanError, RunHeld) as error:
            return error.problems[0].code

    with ThreadPoolExecutor(2) as threads:
        outcomes = sorted(threads.map(outcome, range(2)))
    # the second command may come after the end
    assert outcomes in (["both", "run-held"], ["both", "resume-done"])
    assert iterations(tmp_path / "both") == [0, 1]
