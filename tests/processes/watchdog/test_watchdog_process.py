"""When the watchdog ends a run with a blocked interpreter: a node past its deadline, or a run that was asked
to stop. Never otherwise."""

import faulthandler
import json
import os
import select
import signal
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.checkpoints import file_names
from rlflow.processes.watchdog import process_tag
from rlflow.processes.watchdog.heartbeat_page import HeartbeatPage
from rlflow.processes.watchdog.watchdog_process import (
    ASKED_SECONDS,
    FAILED,
    GRACE_SECONDS,
    INTERRUPTED,
    REFUSED,
    SILENT_SECONDS,
    TICK,
    Messages,
    WatchdogProcess,
    WatchedRun,
)


@pytest.fixture
def watchdog_process():
    return WatchdogProcess(os.getpid(), "", "name", HeartbeatPage.new())


def until(watchdog_process, seconds, state="S", beats=False):
    """Return the verdict after this many seconds of checks, and its time."""
    for tick in range(round(seconds / TICK)):
        if beats:
            watchdog_process.heartbeat_page.beat()
        if (verdict := watchdog_process.check(state, TICK)) is not None:
            return verdict, (tick + 1) * TICK
    return None, seconds


def test_a_blocked_interpreter_ends_the_run_after_the_deadline(watchdog_process):
    with watchdog_process.heartbeat_page.during("judge", 3, 2.0):
        (code, why), when = until(watchdog_process, 60)
    assert code == FAILED
    assert why.startswith("stage 'judge' failed in iteration 3: no result after its deadline of 2 s")
    assert 2.0 + GRACE_SECONDS < when <= 2.0 + GRACE_SECONDS + 2 * TICK


def test_a_run_whose_threads_can_run_ends_itself(watchdog_process):
    with watchdog_process.heartbeat_page.during("judge", 3, 2.0):
        assert until(watchdog_process, 60, beats=True) == (None, 60)


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_suspended_process_does_not_exceed_deadlines(watchdog_process, state):
    watchdog_process.receive_signals(bytes([signal.SIGINT]))
    with watchdog_process.heartbeat_page.during("judge", 3, 2.0):
        assert until(watchdog_process, 600, state) == (None, 600)
        assert until(watchdog_process, 2.0 + GRACE_SECONDS - TICK)[0] is None
        assert until(watchdog_process, 3 * TICK)[0] is not None


def test_a_time_without_checks_counts_as_two_checks(watchdog_process):
    with watchdog_process.heartbeat_page.during("judge", 3, 10.0):
        assert watchdog_process.check("S", 1000.0) is None
        assert max(watchdog_process.ran.values()) == 2 * TICK


def test_without_a_running_node_nothing_is_late(watchdog_process):
    watchdog_process.receive_signals(bytes([signal.SIGINT, signal.SIGTERM]))
    assert until(watchdog_process, 60) == (None, 60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_blocked_run_is_ended_soon_after_a_stop_request(watchdog_process, capfd, number):
    with watchdog_process.heartbeat_page.during("judge", 0, 1800.0):
        until(watchdog_process, 30)
        watchdog_process.receive_signals(bytes([number]))
        (code, why), when = until(watchdog_process, 60)
    assert (code, watchdog_process.warned) == (INTERRUPTED, True)
    assert ASKED_SECONDS < when <= ASKED_SECONDS + 2 * TICK
    assert why.startswith("stopped: stage 'judge' of iteration 0 held the interpreter's lock")
    assert capfd.readouterr().err == (
        "stopping: stage 'judge' of iteration 0 holds the interpreter's lock; if it does not release it within "
        f"{ASKED_SECONDS - TICK:.0f} s the run is killed and its last checkpoint counts\n"
    )


def test_a_second_stop_request_ends_the_run_at_once(watchdog_process):
    with watchdog_process.heartbeat_page.during("judge", 0, 1800.0):
        until(watchdog_process, 10)
        watchdog_process.receive_signals(bytes([signal.SIGINT]))
        watchdog_process.receive_signals(bytes([signal.SIGINT]))
        assert until(watchdog_process, 2.0)[0] is None
        watchdog_process.receive_signals(bytes([signal.SIGTERM]))
        assert until(watchdog_process, 2.0)[0] is None
        watchdog_process.receive_signals(bytes([signal.SIGINT]))
        assert until(watchdog_process, 2.0)[0] is not None


def test_a_run_that_reacts_in_between_gets_its_time_again(watchdog_process):
    with watchdog_process.heartbeat_page.during("judge", 0, 1800.0):
        watchdog_process.receive_signals(bytes([signal.SIGINT]))
        for _ in range(5):
            assert until(watchdog_process, ASKED_SECONDS - 2 * TICK)[0] is None
            watchdog_process.heartbeat_page.beat()


@given(
    st.lists(st.tuples(st.sampled_from("RSDTt"), st.floats(0.0, 3.0), st.booleans()), max_size=60),
    st.floats(0.1, 5.0),
)
def test_no_run_fails_before_its_node_has_run_for_its_deadline(looks, seconds):
    """``looks``: the process's state, the seconds since the last check, and whether a thread could run."""
    watchdog_process, ran, silent = WatchdogProcess(os.getpid(), "", "name", HeartbeatPage.new()), 0.0, 0.0
    with watchdog_process.heartbeat_page.during("judge", 0, seconds):
        for state, passed, beat in looks:
            if beat:
                watchdog_process.heartbeat_page.beat()
            ran += 0.0 if state in "Tt" else min(passed, 2 * TICK)
            silent = (
                0.0
                if beat or watchdog_process.beats == -1
                else silent + (0.0 if state in "Tt" else min(passed, 2 * TICK))
            )
            verdict = watchdog_process.check(state, passed)
            assert (verdict is not None) == (ran > seconds + GRACE_SECONDS and silent >= SILENT_SECONDS)
    os.close(watchdog_process.heartbeat_page.file)


# -- calls of native libraries
# ------------------------------------------------------------------------------------------------------------


CALL = {"call": {"name": "Ray", "seconds": 2.0, "late": "there is no Ray to join"}}


def test_a_call_that_holds_the_lock_past_its_deadline_ends_the_run(watchdog_process, capfd):
    watchdog_process.receive(CALL)
    verdict, when = until(watchdog_process, 60)
    assert verdict == (REFUSED, "there is no Ray to join")
    assert 2.0 + GRACE_SECONDS < when <= 2.0 + GRACE_SECONDS + 2 * TICK
    watchdog_process.stop(*verdict)
    # the run has not begun, so it cannot be resumed
    assert capfd.readouterr().err == "there is no Ray to join\n"


def test_a_call_is_not_late_if_threads_run_or_it_is_over(watchdog_process):
    watchdog_process.receive(CALL)
    assert until(watchdog_process, 60, beats=True) == (None, 60)
    watchdog_process.receive({"call": None})
    watchdog_process.receive_signals(bytes([signal.SIGINT]))
    assert until(watchdog_process, 60) == (None, 60)


def test_a_signal_ends_a_run_whose_call_holds_the_lock(watchdog_process, capfd):
    watchdog_process.receive({"call": {**CALL["call"], "seconds": 120.0}})
    until(watchdog_process, 10)
    watchdog_process.receive_signals(bytes([signal.SIGINT]))
    (code, why), when = until(watchdog_process, 60)
    assert (code, why) == (INTERRUPTED, f"stopped: Ray held the interpreter's lock for {10 + when:.0f} s")
    assert ASKED_SECONDS < when <= ASKED_SECONDS + 2 * TICK
    assert capfd.readouterr().err == (
        f"stopping: Ray holds the interpreter's lock; if it does not release it within {ASKED_SECONDS - TICK:.0f} s "
        "the run is killed\n"
    )


# -- messages and cleanup
# ------------------------------------------------------------------------------------------------------------


def write_status(watchdog_process, folder, **status):
    watchdog_process.run = WatchedRun("runs/mine", str(folder), -1)
    running = {"state": "running", "iteration": 1, "process": {"pid": watchdog_process.pid}, "flow": "ppo"}
    (folder / "status.json").write_text(json.dumps({**running, **status}))


def test_the_status_of_an_ended_run_names_the_resume_command(watchdog_process, tmp_path, capfd):
    write_status(watchdog_process, tmp_path)
    for iteration, revision in ((2, 1), (10, 1), (10, 2), (11, 1)):
        (tmp_path / "checkpoints" / file_names.step(iteration, revision)).mkdir(parents=True)
        if iteration < 11:  # the last one is incomplete
            (tmp_path / "checkpoints" / file_names.step(iteration, revision) / file_names.MANIFEST).touch()
    with watchdog_process.heartbeat_page.during("judge", 12, 1.0):
        watchdog_process.check("S", TICK)
        watchdog_process.stop(FAILED, "because")
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["state"], found["iteration"], found["flow"]) == ("failed", 12, "ppo")
    assert (
        found["error"]
        == f"because\nsaved as {file_names.step(10, 2)}; continue with: rlflow resume runs/mine"
    )
    assert capfd.readouterr().err == found["error"] + "\n"
    assert [path.name for path in tmp_path.glob(".status*")] == []


@pytest.mark.parametrize("status", [{"state": "done"}, {"process": {"pid": 1}}, {"process": None}])
def test_the_status_of_another_or_an_ended_run_is_left_alone(watchdog_process, tmp_path, capfd, status):
    write_status(watchdog_process, tmp_path, **status)
    before = (tmp_path / "status.json").read_text()
    watchdog_process.stop(FAILED, "because")
    watchdog_process.vanished(None)
    assert (tmp_path / "status.json").read_text() == before
    assert capfd.readouterr().err == "because\nno checkpoint was saved: start the run again\n"


@pytest.mark.parametrize(
    ("ending", "state", "says"),
    [
        (lambda: os._exit(0), "failed", "exited with code 0 while stage 'judge' of iteration 2 ran"),
        (lambda: os._exit(7), "failed", "exited with code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "failed", "crashed with SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "running", "was killed by SIGKILL while"),
    ],
    ids=["0", "7", "SEGV", "KILL"],
)
def test_the_end_of_a_vanished_process_is_reported(watchdog_process, tmp_path, capfd, ending, state, says):
    """A process killed from outside counts as dead because it is gone."""
    watchdog_process.pid = os.fork()
    if watchdog_process.pid == 0:
        faulthandler.disable()
        try:
            ending()
        finally:
            os._exit(99)
    os.waitid(os.P_PID, watchdog_process.pid, os.WEXITED | os.WNOWAIT)
    write_status(watchdog_process, tmp_path)
    with watchdog_process.heartbeat_page.during("judge", 2, 1.0):
        watchdog_process.vanished(process_tag.stat(watchdog_process.pid))
    os.waitpid(watchdog_process.pid, 0)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == state
    said = capfd.readouterr().err
    assert says in said
    assert said.endswith("start the run again\n")


def test_a_forked_child_that_reports_late_is_ended_too():
    """The child may first be scheduled when its parent is gone; the message pipe stays open as long as the
    child lives."""
    receiving, sending = os.pipe()
    os.set_blocking(receiving, False)
    with subprocess.Popen(["sleep", "600"], pass_fds=[sending]) as fork, subprocess.Popen(["true"]) as parent:
        gone = parent.pid, process_tag.started(parent.pid)
        parent.wait()
        watchdog_process = WatchdogProcess(*gone, "name", HeartbeatPage.new())
        messages, listened = Messages(watchdog_process, receiving, select.poll()), []

        def listen():
            if listened:  # the first check finds no message yet
                os.write(sending, json.dumps({"fork": fork.pid}).encode() + b"\n")
                os.close(sending)
                watchdog_process.listen = messages.listen
            listened.append(messages.listen())
            return listened[-1]

        watchdog_process.listen = listen
        assert watchdog_process.clear() == []
        assert listened == [True, True]
        assert fork.wait(20) == -signal.SIGKILL
    os.close(receiving)


def test_without_a_child_the_watchdog_awaits_no_messages():
    receiving, sending = os.pipe()
    os.set_blocking(receiving, False)
    os.write(sending, b'{"folder": "/nowhere"}\n{"torn"')
    os.close(sending)
    watchdog_process = WatchdogProcess(os.getpid(), "", "name", HeartbeatPage.new())
    assert Messages(watchdog_process, receiving, select.poll()).listen() is False
    assert watchdog_process.folders == ["/nowhere"]
    os.close(receiving)


def test_a_closed_message_pipe_wakes_the_watchdog_once():
    """Otherwise the watchdog would always be awake, because the end of a pipe is always readable."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    watchdog_process = WatchdogProcess(os.getpid(), "", "name", HeartbeatPage.new())
    messages = Messages(watchdog_process, reading, poll)
    assert messages.listen() is True
    os.write(writing, b'{"folder": "/nowhere"}\n')
    assert messages.listen() is True
    assert watchdog_process.folders == ["/nowhere"]
    os.close(writing)
    assert poll.poll(0) != []
    assert (messages.listen(), messages.listen()) == (False, False)
    assert poll.poll(0) == []
    os.close(reading)
