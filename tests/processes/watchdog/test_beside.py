"""The watchdog process of a process: it exists while it is needed, ends started processes, and is replaced if
it is killed."""

import os
import signal
import subprocess
import sys
import threading

import pytest
from processes import gone, until

from rlflow.processes.watchdog import beside, private, process_tag
from rlflow.processes.watchdog.beside import ProcessExit, Watchdog


@pytest.fixture
def watchdog_process():
    watchdog_process = Watchdog.start()
    yield watchdog_process
    watchdog_process.close()


def test_only_processes_started_meanwhile_end_with_the_run(watchdog_process):
    outside = subprocess.Popen(["sleep", "600"])
    try:
        with watchdog_process.marking():
            inside = subprocess.Popen(["sh", "-c", "setsid sleep 600 & wait"], start_new_session=True)
            until(lambda: len(process_tag.marked(watchdog_process.name)) == 2)
        assert process_tag.MARK not in os.environ
        watchdog_process.close()
        assert process_tag.marked(watchdog_process.name) == []
        assert inside.wait() == -signal.SIGKILL
        assert outside.poll() is None
    finally:
        outside.kill()
        outside.wait()


def test_a_watchdog_ends_when_closed_even_twice(watchdog_process):
    pid = until(lambda: watchdog_process.process)
    assert (
        process_tag.stat(pid).parent != os.getpid()
    )  # code that ends all its children does not end the watchdog
    # and does not wait for its thread
    assert [thread.daemon for thread in threading.enumerate() if thread.name == "watchdog"] == [True]
    watchdog_process.close()
    assert gone(pid)
    watchdog_process.close()
    assert os._exit is beside._exit


def test_nested_runs_keep_both_names(watchdog_process, monkeypatch):
    monkeypatch.setenv(process_tag.MARK, "outer")
    with watchdog_process.marking():
        assert os.environ[process_tag.MARK] == f"outer/{watchdog_process.name}"
    assert os.environ[process_tag.MARK] == "outer"


def test_a_killed_watchdog_is_replaced(watchdog_process, tmp_path):
    (tmp_path / "status.json").write_text("{}")
    watchdog_process.watch(tmp_path)
    first = until(lambda: watchdog_process.process)
    os.kill(first, signal.SIGKILL)
    second = until(lambda: watchdog_process.process != first and watchdog_process.process)
    assert process_tag.stat(second) is not None
    with watchdog_process.marking():
        child = subprocess.Popen(["sleep", "600"])
    watchdog_process.close()
    assert gone(second)
    assert child.wait() == -signal.SIGKILL


def test_a_repeatedly_killed_watchdog_is_not_replaced(watchdog_process):
    killed = {None}
    for _ in range(beside.STARTS):
        pid = until(lambda: watchdog_process.process not in killed and watchdog_process.process)
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    until(lambda: "watchdog" not in [thread.name for thread in threading.enumerate()])
    with watchdog_process.marking():
        child = subprocess.Popen(["sleep", "600"])
    watchdog_process.close()
    assert child.wait() == -signal.SIGKILL


def test_the_private_folder_is_removed_at_the_end(watchdog_process, tmp_path):
    for name in ("own", "planted"):
        watchdog_process.remove_in_the_end(tmp_path / name)
    private.create(tmp_path / "own")
    (tmp_path / "victim").mkdir()
    (tmp_path / "planted").symlink_to(tmp_path / "victim")
    first = until(lambda: watchdog_process.process)
    os.kill(first, signal.SIGKILL)
    until(lambda: watchdog_process.process != first)
    watchdog_process.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["planted", "victim"]


def test_without_room_for_a_watchdog_a_run_continues(monkeypatch, tmp_path):
    def refused(*words, **options):
        raise OSError

    monkeypatch.setattr(subprocess, "Popen", refused)
    watchdog_process = Watchdog.start()
    with watchdog_process.heartbeat_page.during("judge", 0, 1.0), watchdog_process.marking():
        pass
    watchdog_process.watch(tmp_path)
    watchdog_process.close()
    assert watchdog_process.signals == -1


def test_within_a_node_no_python_code_ends_the_process(watchdog_process):
    with (
        watchdog_process.heartbeat_page.during("judge", 0, 1.0),
        pytest.raises(ProcessExit, match=r"os\._exit\(0\)"),
    ):
        os._exit(0)
    pid = os.fork()
    if pid == 0:  # a child may end in any way
        with watchdog_process.heartbeat_page.during("judge", 0, 1.0):
            os._exit(5)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5


VANISHING = """
import os, subprocess, sys, time
from pathlib import Path
from rlflow.processes.watchdog import private
from rlflow.processes.watchdog.beside import Watchdog
from rlflow.monitoring import status

folder = Path(sys.argv[1])
dog = Watchdog.start()
dog.watch(folder)
dog.remove_in_the_end(folder / "own")
private.create(folder / "own")
(folder / "own" / "socket").touch()
status.write(folder, status.begun("mine", 9))
with dog.marking(), dog.heartbeat_page.during("judge", 4, 60.0):
    child = subprocess.Popen(["sh", "-c", "setsid sleep 600 & wait"])
    printed, written = os.pipe()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os.write(written, b".")
        time.sleep(600)
    os.read(printed, 1)
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "says", "state"),
    [
        (
            "__import__('ctypes').CDLL(None)._exit(0)",
            "exited with code 0 while stage 'judge' of iteration 4 ran",
            "failed",
        ),
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL", "running"),
        ("os.kill(os.getpid(), 11)", "crashed with SIGSEGV", "failed"),
    ],
)
def test_a_vanished_process_leaves_only_messages(python, tmp_path, ending, says, state):
    """Its started processes, its forks, which no environment variable marks, and its private folder are all
    removed."""
    with subprocess.Popen(
        [sys.executable, "-c", VANISHING.replace("{ending}", ending), str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        fork = int(process.stdout.readline())
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        said = process.stderr.read()  # until the watchdog closes it
        assert gone(fork, 0)
    assert not (tmp_path / "own").exists()
    assert says in said
    assert "start the run again" in said
    assert f'"state": "{state}"' in (tmp_path / "status.json").read_text()


HOLDING = """
import ctypes, os, sys
from pathlib import Path
from rlflow.processes.watchdog.beside import Watchdog
from rlflow.monitoring import status

folder = Path(sys.argv[1])
dog = Watchdog.start()
dog.watch(folder)
status.write(folder, status.begun("mine", 9))
with dog.heartbeat_page.during("judge", 4, 0.1):
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
"""


@pytest.mark.slow
def test_a_process_that_holds_the_lock_past_a_deadline_is_ended(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HOLDING, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == -signal.SIGKILL
    assert "stage 'judge' failed in iteration 4: no result after its deadline of 0.1 s" in done.stderr
    assert '"state": "failed"' in (tmp_path / "status.json").read_text()


CALLING = """
import ctypes, os, sys
from rlflow.processes.watchdog import launcher
from rlflow.processes.watchdog.beside import Watchdog, during_call

if (code := launcher.apart()) is not None:
    sys.exit(code)
dog = Watchdog.start()
with during_call("Ray", 0.1, "no Ray answers"):
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
"""


@pytest.mark.slow
def test_a_native_call_past_its_deadline_ends_with_code_2():
    done = subprocess.run([sys.executable, "-c", CALLING], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (2, "no Ray answers\n")


def test_signals_reach_the_watchdog_only_during_a_call(watchdog_process):
    before = signal.set_wakeup_fd(-1)
    try:
        with beside.during_call("Ray", 60.0, "late"):
            assert signal.set_wakeup_fd(watchdog_process.signals) == watchdog_process.signals
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.set_wakeup_fd(before)


ABORTING = """
import os, signal, sys, time
from rlflow.processes.watchdog import launcher
from rlflow.processes.watchdog.beside import Watchdog, during_call

if (code := launcher.apart()) is not None:
    sys.exit(code)
dog = Watchdog.start()
while dog.process is None:
    time.sleep(0.01)
signal.signal(signal.SIGTERM, lambda number, frame: os.abort())
with during_call("Ray", 60.0, "late"):
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.slow
def test_a_library_that_aborts_at_a_signal_stops_the_run():
    done = subprocess.run([sys.executable, "-c", ABORTING], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (130, "stopped before the run began\n")
