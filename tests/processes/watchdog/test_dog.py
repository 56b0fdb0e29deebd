"""When the watchdog ends a run: a node past its deadline, or a run that was asked to stop, whose interpreter
is held; and never else."""

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
from rlflow.processes.watchdog import kin
from rlflow.processes.watchdog.board import Board
from rlflow.processes.watchdog.dog import (
    ASKED_SECONDS,
    FAILED,
    GRACE_SECONDS,
    INTERRUPTED,
    REFUSED,
    SILENT_SECONDS,
    TICK,
    Dog,
    Messages,
    WatchedRun,
)


@pytest.fixture
def dog():
    return Dog(os.getpid(), "", "name", Board.new())


def until(dog, seconds, state="S", beats=False):
    """The verdict after so many seconds of looking, and when it came."""
    for tick in range(round(seconds / TICK)):
        if beats:
            dog.board.beat()
        if (verdict := dog.check(state, TICK)) is not None:
            return verdict, (tick + 1) * TICK
    return None, seconds


def test_a_held_interpreter_ends_the_run_after_the_deadline_of_its_node(dog):
    with dog.board.during("judge", 3, 2.0):
        (code, why), when = until(dog, 60)
    assert code == FAILED
    assert why.startswith("stage 'judge' failed in iteration 3: no result after its deadline of 2 s")
    assert 2.0 + GRACE_SECONDS < when <= 2.0 + GRACE_SECONDS + 2 * TICK


def test_one_that_lets_threads_run_ends_by_itself(dog):
    with dog.board.during("judge", 3, 2.0):
        assert until(dog, 60, beats=True) == (None, 60)


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_process_passes_no_deadline(dog, state):
    dog.receive_signals(bytes([signal.SIGINT]))
    with dog.board.during("judge", 3, 2.0):
        assert until(dog, 600, state) == (None, 600)
        assert until(dog, 2.0 + GRACE_SECONDS - TICK)[0] is None
        assert until(dog, 3 * TICK)[0] is not None


def test_a_time_in_which_the_watchdog_could_not_look_counts_as_two_looks(dog):
    with dog.board.during("judge", 3, 10.0):
        assert dog.check("S", 1000.0) is None
        assert max(dog.ran.values()) == 2 * TICK


def test_without_a_node_under_way_nothing_is_late_or_deaf(dog):
    dog.receive_signals(bytes([signal.SIGINT, signal.SIGTERM]))
    assert until(dog, 60) == (None, 60)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_does_not_hear_is_ended_soon_after_it_was_asked(dog, capfd, number):
    with dog.board.during("judge", 0, 1800.0):
        until(dog, 30)
        dog.receive_signals(bytes([number]))
        (code, why), when = until(dog, 60)
    assert (code, dog.warned) == (INTERRUPTED, True)
    assert ASKED_SECONDS < when <= ASKED_SECONDS + 2 * TICK
    assert why.startswith("stopped: stage 'judge' of iteration 0 held the interpreter's lock")
    assert capfd.readouterr().err == (
        "stopping: stage 'judge' of iteration 0 holds the interpreter's lock; if it does not release it within "
        f"{ASKED_SECONDS - TICK:.0f} s the run is killed and its last checkpoint counts\n"
    )


def test_asked_twice_it_is_ended_at_once_and_what_comes_twice_at_once_is_once(dog):
    with dog.board.during("judge", 0, 1800.0):
        until(dog, 10)
        dog.receive_signals(bytes([signal.SIGINT]))
        dog.receive_signals(bytes([signal.SIGINT]))
        assert until(dog, 2.0)[0] is None
        dog.receive_signals(bytes([signal.SIGTERM]))
        assert until(dog, 2.0)[0] is None
        dog.receive_signals(bytes([signal.SIGINT]))
        assert until(dog, 2.0)[0] is not None


def test_one_that_hears_in_between_has_its_time_again(dog):
    with dog.board.during("judge", 0, 1800.0):
        dog.receive_signals(bytes([signal.SIGINT]))
        for _ in range(5):
            assert until(dog, ASKED_SECONDS - 2 * TICK)[0] is None
            dog.board.beat()


@given(
    st.lists(st.tuples(st.sampled_from("RSDTt"), st.floats(0.0, 3.0), st.booleans()), max_size=60),
    st.floats(0.1, 5.0),
)
def test_no_run_is_failed_before_its_node_has_run_for_its_deadline(looks, seconds):
    """``looks``: the process's state, seconds since the last look, and whether the interpreter had let a
    thread run."""
    dog, ran, silent = Dog(os.getpid(), "", "name", Board.new()), 0.0, 0.0
    with dog.board.during("judge", 0, seconds):
        for state, passed, beat in looks:
            if beat:
                dog.board.beat()
            ran += 0.0 if state in "Tt" else min(passed, 2 * TICK)
            silent = (
                0.0 if beat or dog.beats == -1 else silent + (0.0 if state in "Tt" else min(passed, 2 * TICK))
            )
            verdict = dog.check(state, passed)
            assert (verdict is not None) == (ran > seconds + GRACE_SECONDS and silent >= SILENT_SECONDS)
    os.close(dog.board.file)


# -- calls of native libraries
# ------------------------------------------------------------------------------------------------------------


CALL = {"call": {"name": "Ray", "seconds": 2.0, "late": "there is no Ray to join"}}


def test_a_call_that_keeps_the_interpreters_lock_past_its_deadline_refuses_the_run(dog, capfd):
    dog.receive(CALL)
    verdict, when = until(dog, 60)
    assert verdict == (REFUSED, "there is no Ray to join")
    assert 2.0 + GRACE_SECONDS < when <= 2.0 + GRACE_SECONDS + 2 * TICK
    dog.stop(*verdict)
    assert capfd.readouterr().err == "there is no Ray to join\n"  # no run has begun that could be resumed


def test_a_call_ends_itself_where_threads_run_and_no_call_is_late_once_it_is_over(dog):
    dog.receive(CALL)
    assert until(dog, 60, beats=True) == (None, 60)
    dog.receive({"call": None})
    dog.receive_signals(bytes([signal.SIGINT]))
    assert until(dog, 60) == (None, 60)


def test_a_signal_ends_a_run_whose_call_keeps_the_interpreters_lock(dog, capfd):
    dog.receive({"call": {**CALL["call"], "seconds": 120.0}})
    until(dog, 10)
    dog.receive_signals(bytes([signal.SIGINT]))
    (code, why), when = until(dog, 60)
    assert (code, why) == (INTERRUPTED, f"stopped: Ray held the interpreter's lock for {10 + when:.0f} s")
    assert ASKED_SECONDS < when <= ASKED_SECONDS + 2 * TICK
    assert capfd.readouterr().err == (
        f"stopping: Ray holds the interpreter's lock; if it does not release it within {ASKED_SECONDS - TICK:.0f} s "
        "the run is killed\n"
    )


# -- what it leaves
# ------------------------------------------------------------------------------------------------------------


def told(dog, folder, **status):
    dog.run = WatchedRun("runs/mine", str(folder), -1)
    running = {"state": "running", "iteration": 1, "process": {"pid": dog.pid}, "flow": "ppo"}
    (folder / "status.json").write_text(json.dumps({**running, **status}))


def test_a_run_that_is_ended_says_so_in_its_status_and_how_to_go_on(dog, tmp_path, capfd):
    told(dog, tmp_path)
    for iteration, revision in ((2, 1), (10, 1), (10, 2), (11, 1)):
        (tmp_path / "checkpoints" / file_names.step(iteration, revision)).mkdir(parents=True)
        if iteration < 11:  # the last one is not whole
            (tmp_path / "checkpoints" / file_names.step(iteration, revision) / file_names.MANIFEST).touch()
    with dog.board.during("judge", 12, 1.0):
        dog.check("S", TICK)
        dog.stop(FAILED, "because")
    found = json.loads((tmp_path / "status.json").read_text())
    assert (found["state"], found["iteration"], found["flow"]) == ("failed", 12, "ppo")
    assert (
        found["error"]
        == f"because\nsaved as {file_names.step(10, 2)}; continue with: rlflow resume runs/mine"
    )
    assert capfd.readouterr().err == found["error"] + "\n"
    assert [path.name for path in tmp_path.glob(".status*")] == []


@pytest.mark.parametrize("status", [{"state": "done"}, {"process": {"pid": 1}}, {"process": None}])
def test_what_another_wrote_or_what_has_ended_is_left_as_it_is(dog, tmp_path, capfd, status):
    told(dog, tmp_path, **status)
    before = (tmp_path / "status.json").read_text()
    dog.stop(FAILED, "because")
    dog.vanished(None)
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
def test_of_a_process_that_vanishes_is_said_how_and_what_it_did(dog, tmp_path, capfd, ending, state, says):
    """One that was killed from outside counts as died by being gone."""
    dog.pid = os.fork()
    if dog.pid == 0:
        faulthandler.disable()
        try:
            ending()
        finally:
            os._exit(99)
    os.waitid(os.P_PID, dog.pid, os.WEXITED | os.WNOWAIT)
    told(dog, tmp_path)
    with dog.board.during("judge", 2, 1.0):
        dog.vanished(kin.stat(dog.pid))
    os.waitpid(dog.pid, 0)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == state
    said = capfd.readouterr().err
    assert says in said
    assert said.endswith("start the run again\n")


def test_a_forked_child_that_tells_of_itself_after_its_parent_vanished_is_ended_too():
    """It may first be scheduled when its parent is gone: as long as it lives the pipe of messages is open."""
    receiving, sending = os.pipe()
    os.set_blocking(receiving, False)
    with subprocess.Popen(["sleep", "600"], pass_fds=[sending]) as fork, subprocess.Popen(["true"]) as parent:
        gone = parent.pid, kin.started(parent.pid)
        parent.wait()
        dog = Dog(*gone, "name", Board.new())
        messages, listened = Messages(dog, receiving, select.poll()), []

        def listen():
            if listened:  # at the first look nothing has come yet
                os.write(sending, json.dumps({"fork": fork.pid}).encode() + b"\n")
                os.close(sending)
                dog.listen = messages.listen
            listened.append(messages.listen())
            return listened[-1]

        dog.listen = listen
        assert dog.clear() == []
        assert listened == [True, True]
        assert fork.wait(20) == -signal.SIGKILL
    os.close(receiving)


def test_nobody_waits_for_messages_where_no_child_is_left():
    receiving, sending = os.pipe()
    os.set_blocking(receiving, False)
    os.write(sending, b'{"folder": "/nowhere"}\n{"torn"')
    os.close(sending)
    dog = Dog(os.getpid(), "", "name", Board.new())
    assert Messages(dog, receiving, select.poll()).listen() is False
    assert dog.folders == ["/nowhere"]
    os.close(receiving)


def test_a_pipe_that_nobody_writes_to_any_more_wakes_the_watchdog_once():
    """Else it would be awake all the time, since the end of a pipe can always be read."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    dog = Dog(os.getpid(), "", "name", Board.new())
    messages = Messages(dog, reading, poll)
    assert messages.listen() is True
    os.write(writing, b'{"folder": "/nowhere"}\n')
    assert messages.listen() is True
    assert dog.folders == ["/nowhere"]
    os.close(writing)
    assert poll.poll(0) != []
    assert (messages.listen(), messages.listen()) == (False, False)
    assert poll.poll(0) == []
    os.close(reading)
