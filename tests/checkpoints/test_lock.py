"""One process per run folder; other processes get an error that names it."""

import json
import os
import re
import resource
import socket
import subprocess
import sys

import pytest

from rlflow.checkpoints.lock import Lock
from rlflow.errors import PlanError, RunHeld

HOLD = """
import os, sys
from pathlib import Path
from rlflow.checkpoints.lock import Lock
lock = Lock(Path(sys.argv[1])).acquire()
print('held', flush=True)
"""


def started(code, folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD + code, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock until its input ends."""
    process = started("sys.stdin.read()", tmp_path)
    yield process
    process.communicate()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list them")
def test_a_lock_taken_twice_leaves_no_open_descriptor(tmp_path):
    before = sorted(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Lock(tmp_path):
            pass
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rounds"), [("with", 50), ("without", 50)])
def test_one_of_eight_processes_wins_the_lock(tmp_path, injected, mode, rounds):
    found = [json.loads(line) for line in injected("lock", tmp_path, mode, rounds)]
    assert [one["won"] for one in found] == [1] * rounds
    for one in found:
        assert all(
            re.search(
                r"RunHeld: another process uses the run directory(.|\n)*process \d+ on .* since 20", text
            )
            for text in one["said"]
        ), one
        # the winner, named by all losers
        assert len({re.search(r"process (\d+) on", text)[1] for text in one["said"]}) == 1


@pytest.mark.slow
def test_the_message_names_the_holder_and_the_remedy(tmp_path, holder):
    with pytest.raises(RunHeld) as caught:
        Lock(tmp_path).acquire()
    assert f"process {holder.pid} on {socket.gethostname()} since 20" in str(caught.value)
    assert f"remedy:   wait for it, or stop it: kill {holder.pid}" in str(caught.value)


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_taken_over(tmp_path, holder):
    holder.kill()
    holder.wait()
    with Lock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()


def test_a_released_lock_is_free_and_names_nobody(tmp_path):
    for _ in range(3):
        with Lock(tmp_path), pytest.raises(RunHeld, match=f"process {os.getpid()} on"):
            Lock(tmp_path).acquire()
        assert (tmp_path / "run.lock").read_text() == ""


def test_a_lock_is_released_when_the_body_raises(tmp_path):
    with pytest.raises(KeyError), Lock(tmp_path):
        raise KeyError
    with Lock(tmp_path):
        pass


@pytest.mark.slow
def test_a_copy_of_a_running_folder_is_free(tmp_path, holder):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/run.lock").write_bytes((tmp_path / "run.lock").read_bytes())
    with Lock(tmp_path / "copy"):
        pass


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"pid": "x"}', b'{"pid": 1}', b"\xff" * 5000, b"null"]
)
def test_a_lock_without_a_holder_is_free_with_any_content(tmp_path, content):
    (tmp_path / "run.lock").write_bytes(content)
    with Lock(tmp_path):
        pass


@pytest.mark.slow
def test_a_child_that_outlives_the_holder_is_named(tmp_path):
    """A forked child shares its parent's lock; a newly started process would not."""
    parent = started("os._exit(0) if os.fork() else sys.stdin.read()", tmp_path)
    assert parent.wait(60) == 0
    with pytest.raises(RunHeld, match=r"which has ended(.|\n)*fuser"):
        Lock(tmp_path, patience=0.1).acquire()
    parent.communicate()


def without_locks(monkeypatch):
    def refused(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refused)


def test_without_locks_a_holder_on_another_machine_is_believed(tmp_path, monkeypatch):
    without_locks(monkeypatch)
    with Lock(tmp_path):
        says = json.loads((tmp_path / "run.lock.owner").read_text())
    (tmp_path / "run.lock.owner").write_text("")
    elsewhere = says | {
        "host": "node-7",
        "boot": "another",
        "file": os.stat(tmp_path / "run.lock.owner").st_ino,
    }
    (tmp_path / "run.lock.owner").write_text(json.dumps(elsewhere))
    with pytest.raises(RunHeld, match=r"on node-7(.|\n)*if it has certainly ended, delete"):
        Lock(tmp_path).acquire()


@pytest.mark.parametrize("change", [{"boot": "an earlier one"}, {"started": "1"}, {"file": 1}], ids=str)
def test_without_locks_an_impossible_holder_is_replaced(tmp_path, monkeypatch, change):
    without_locks(monkeypatch)
    held = Lock(tmp_path).acquire()
    path = tmp_path / "run.lock.owner"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with Lock(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    held.release()


def test_a_lock_that_cannot_be_written_gives_the_reason(tmp_path):
    with pytest.raises(PlanError, match="cannot be locked"):
        Lock(tmp_path / "nowhere").acquire()
    (tmp_path / "run.lock").symlink_to("elsewhere")
    with pytest.raises(PlanError, match="cannot be locked"):
        Lock(tmp_path).acquire()
    assert not (tmp_path / "elsewhere").exists()


def test_a_lock_works_on_a_full_disk(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with Lock(tmp_path), pytest.raises(RunHeld, match="a process that has not written its name"):
            Lock(tmp_path, patience=0.0).acquire()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
