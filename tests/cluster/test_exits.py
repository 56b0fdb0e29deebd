"""Stages that fork their worker, and a Ray that loses a process: the run ends with a message and saves its
state if its workers still answer. test_cluster_engine.py covers stages that end their worker."""

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from started import marked, until

import rlflow
from rlflow.checkpoints.reading import load_latest
from rlflow.processes.watchdog import process_tag

pytestmark = pytest.mark.slow

HANGING = str(Path(__file__).with_name("hanging.py"))
MARK = "RLFLOW_TEST_MARK"
SMALL = {"prompts": 6, "iterations": 3, "held_out": 0, "threads": 1, "backend": "null"}


def run(tmp_path, name, fault, **keywords):
    return rlflow.run(
        HANGING,
        out=str(tmp_path),
        name=name,
        **SMALL,
        **keywords,
        **{"hp.count": str(tmp_path / f"{name}.calls"), "hp.fault": fault, "hp.place": "judge", "hp.call": 3},
    )


def metrics(folder):
    """Return the lines without times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if "second" not in name} for line in lines]


def test_a_stage_may_fork_on_a_worker(tmp_path, ray_address):
    forked = run(tmp_path, "forked", "fork and daemon", pools="all=2", ray_address=ray_address)
    for found, wanted in zip(
        metrics(forked.folder), metrics(run(tmp_path, "straight", "").folder), strict=True
    ):
        assert found == pytest.approx(wanted, rel=1e-12)  # sums of two ranks are rounded differently
    assert (tmp_path / "forked.calls").stat().st_size == 6
    assert until(lambda: not asleep(), 240)


def asleep():
    """Return the processes of the fault that starts one."""
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"612345" in text_of(path)]


def text_of(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def started(tmp_path, *words):
    """Start `rlflow run` on its own Ray as a process; return its mark and the file with its output."""
    mark, said = uuid.uuid4().hex, tmp_path / "said"
    command = [
        sys.executable,
        "-m",
        "rlflow.cli.main",
        "run",
        HANGING,
        "--backend",
        "null",
        "--pools",
        "all=1",
        "--iterations",
        "1000",
        "--prompts",
        "6",
        "--held-out",
        "0",
        "--out",
        tmp_path,
        "--name",
        "mine",
        "--generate_seconds",
        "0.1",
        *words,
    ]
    with said.open("wb") as file:
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=file,
            stderr=file,
            env={**os.environ, MARK: mark},
            start_new_session=True,
        )
    return process, mark, said


def iterations(tmp_path):
    path = tmp_path / "mine" / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


@pytest.mark.parametrize("name", ["raylet", "gcs_server"])
def test_a_run_whose_ray_loses_a_process_ends_with_a_message(tmp_path, name):
    process, mark, said = started(tmp_path, "--save-every", 5)
    try:
        assert until(lambda: iterations(tmp_path) > 7, 240), said.read_text()
        (pid,) = [
            int(text.split()[0])
            for text in marked(mark.encode())
            if os.path.basename(process_tag.command(int(text.split()[0]))) == name
        ]
        os.kill(pid, signal.SIGKILL)
        assert process.wait(60) == 1
        text = said.read_text()
        assert f"Ray's {name} (pid {pid}) has died" in text
        newest = load_latest(tmp_path / "mine").snapshot.iteration
        # without a raylet, from a copy of the workers' state that may not have been complete yet
        behind = iterations(tmp_path) - newest
        assert behind in ((0,) if name == "gcs_server" else (0, 1)), text
        assert re.search(rf"saved as step-0*{newest}(-\d+)?; to continue: rlflow resume .*mine\n$", text)
        assert json.loads((tmp_path / "mine" / "status.json").read_text())["state"] == "failed"
        assert "Traceback" not in text
        assert "state-dump" not in text  # pages of Ray's own log
        assert until(lambda: not marked(mark.encode()), 20), marked(mark.encode())
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("when", "number"),
    [("starting a Ray for this run", signal.SIGTERM), ("workers start and load", signal.SIGTERM)],
)
def test_a_run_stopped_while_workers_load_reports_only_that(tmp_path, when, number):
    process, mark, said = started(tmp_path)
    try:
        assert until(lambda: when in said.read_text(), 120), said.read_text()
        process.send_signal(number)
        assert process.wait(60) == 130
        assert said.read_text().splitlines()[-1] == "stopped before the run began"
        assert "***" not in said.read_text()
        assert until(lambda: not marked(mark.encode()), 20), marked(mark.encode())
    finally:
        process.kill()
        process.wait()
