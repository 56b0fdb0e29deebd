"""At any end of a run, its exit code, its message and status.json agree, the run resumes from its last save,
and no process of it is left."""

import contextlib
import json
import os
import signal
import time
from pathlib import Path

import pytest
from process_faults import SECONDS, came_to, launch, words
from process_faults import resumed as resumed_by_command
from processes import until
from run_faults import MARK, command, content, differences, marked, resumed

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def surroundings(monkeypatch):
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.setenv(SECONDS, "60")  # a stage gets enough time, except in the test of the deadline


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The content of the undisturbed run, made in a fork of this process."""
    folder = tmp_path_factory.mktemp("straight")
    assert command(words(folder, "straight"), folder / "said").code == 0
    return came_to(folder / "runs" / "straight")


def goes_on(run, straight):
    """Resume the run in a fork of this process, which has already imported the modules of a run."""
    assert resumed(run.run) == 0
    assert list(differences(came_to(run.run), straight)) == []


def goes_on_by_command(run, straight):
    again = resumed_by_command(run)
    assert again.ended() == 0, again.output()
    assert list(differences(came_to(run.run), straight)) == []
    assert again.left() == []


@pytest.mark.parametrize(
    ("fault", "code", "says"),
    [
        (
            "hold",
            1,
            (
                "stage 'judge' failed in iteration 2: no result after its deadline of 5 s, and its code "
                "holds the interpreter's lock"
            ),
        ),
        ("sys.exit", 1, "stage 'judge' failed in iteration 2 on 8 rows: SystemExit: 0 (raised by "),
        ("interrupt", 1, "stage 'judge' failed in iteration 2 on 8 rows: KeyboardInterrupt (raised by "),
        (
            "os._exit",
            1,
            "stage 'judge' failed in iteration 2 on 8 rows: ProcessExit: os._exit(0) (raised by ",
        ),
        ("C exit", 1, "the run's process exited with code 0 while stage 'judge' of iteration 2 ran"),
        (
            "segfault",
            -signal.SIGSEGV,
            "the run's process crashed with SIGSEGV while stage 'judge' of iteration 2 ran",
        ),
    ],
)
def test_a_stage_that_ends_the_process_has_failed(tmp_path, straight, fault, code, says, monkeypatch):
    monkeypatch.setenv(SECONDS, "5")
    run = launch(tmp_path, "run", fault=fault)
    assert run.ended() == code
    assert says in run.output()
    assert "rlflow resume" in run.output().splitlines()[-1]
    assert "Traceback" not in run.output()
    assert (run.status["state"], run.status["iteration"]) == ("failed", 2)
    assert says in run.status["error"]
    assert run.left() == []
    if fault == "hold":  # the message shows the line of the stage
        assert "runs/flows/faulty.py:" in run.output()
        assert " in judge" in run.output()
    goes_on(run, straight)


@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_ends_a_run_with_a_blocked_interpreter(tmp_path, straight, terminal):
    run = launch(tmp_path, "run", fault="hold", terminal=terminal)
    until((tmp_path / "run.once").exists, 240.0)
    if terminal:
        os.write(run.terminal, b"\x03")
    else:
        os.kill(run.pid, signal.SIGINT)
    assert run.ended() == 130  # long before its deadline
    assert run.status["state"] == "interrupted"
    assert run.left() == []
    (goes_on_by_command if terminal else goes_on)(run, straight)


def test_a_suspended_process_does_not_exceed_deadlines(tmp_path, straight, monkeypatch):
    """The stage takes a fifth of its deadline; the process is suspended for longer than the deadline."""
    monkeypatch.setenv(SECONDS, "5")
    run = launch(tmp_path, "run", fault="sleep")
    until((tmp_path / "run.once").exists, 240.0)
    os.killpg(run.pid, signal.SIGSTOP)
    time.sleep(6)
    os.killpg(run.pid, signal.SIGCONT)
    assert run.ended() == 0, run.output()
    assert list(differences(came_to(run.run), straight)) == []


@pytest.mark.parametrize("fault", ["asked", "speak"])
def test_a_run_is_saved_when_its_terminal_hangs_up(tmp_path, straight, fault):
    run = launch(tmp_path, "run", fault=fault, terminal=True)
    until((tmp_path / "run.once").exists, 240.0)
    run.hang_up()
    assert run.ended() == 130
    # the interrupted iteration is repeated
    assert (run.status["state"], run.status["iteration"]) == ("interrupted", 2)
    assert content(run.run).iteration == 2
    goes_on(run, straight)


@pytest.mark.parametrize(("fault", "reward"), [("fork", "returns"), ("fork and exit", "exits")])
def test_stages_and_rewards_may_fork(tmp_path, straight, fault, reward):
    run = launch(tmp_path, "run", fault=fault, reward=reward)
    assert run.ended() == 0, run.output()
    assert list(differences(came_to(run.run), straight)) == []
    assert run.left() == []
    scores = [json.loads(line) for line in (run.run / "samples.jsonl").read_text().splitlines()]
    assert all(row["scores"] == float(row["completion"].split(".")[0]) for row in scores)


@pytest.mark.parametrize("end", ["done", "launcher killed", "run killed", "watchdog and launcher killed"])
def test_processes_of_stages_and_rewards_end_with_the_run(tmp_path, end):
    """Some run in sessions of their own, some lost their parent, and one is a fork."""
    run = launch(
        tmp_path,
        "run",
        iterations=6 if end == "done" else 100_000,
        save_every=1000,
        fault="leaves all",
        reward="leaves all",
    )
    run.reaches(4)
    if end == "run killed":
        os.kill(run.driver, signal.SIGKILL)
    elif end != "done":
        for pid in watchdogs(run) if end.startswith("watchdog") else ():
            os.kill(pid, signal.SIGKILL)
        os.kill(run.pid, signal.SIGKILL)
    assert run.ended() == (0 if end == "done" else -signal.SIGKILL)
    if end.startswith("watchdog"):  # killed before it could end anything, or after it was replaced
        for pid in marked(run.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    else:
        assert run.left() == []
    if end == "run killed":
        assert "was killed by SIGKILL" in run.output()
        assert run.status["state"] == "running"  # the reader sees that the process is gone


def watchdogs(run):
    return [
        pid
        for pid in marked(run.mark)
        if b"watchdog.watchdog_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
