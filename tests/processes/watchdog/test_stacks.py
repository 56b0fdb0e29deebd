"""The end of a shown stack is recognised by names of files and functions; these tests check that the names
exist."""

import subprocess
import sys

import pytest

from rlflow.execution import apply, executor
from rlflow.processes.watchdog import stacks, watchdog_process

DUMP = """Stack (most recent call first):
  File "/home/me/flow.py", line 7 in judge
  File "/opt/rlflow/execution/apply.py", line 30 in apply_stage
  File "/opt/rlflow/runs/loop.py", line 5 in run
Stack (most recent call first):
  File "/usr/lib/python3/threading.py", line 3 in wait
"""


@pytest.mark.parametrize("module", [apply, executor])
def test_the_watchdog_knows_the_files_that_call_nodes(module):
    assert watchdog_process.RUNNER in module.__file__


def test_the_frames_of_each_running_node_are_shown():
    assert (
        stacks.shown(DUMP, lambda path, name: watchdog_process.RUNNER in path)
        == "    home/me/flow.py:7 in judge"
    )


def test_methods_that_run_worker_code_are_methods_of_the_host():
    pytest.importorskip("ray")
    from rlflow.cluster.health import postmortem
    from rlflow.cluster.rpc import actor, host

    assert issubclass(actor.RayHost.__ray_metadata__.modified_class, host.Host)
    assert {name for name in host.CALLS if callable(getattr(host.Host, name, None))} == host.CALLS
    assert host.__file__.endswith(postmortem.HOST)


READING = """
import ctypes, os, signal, threading
from rlflow.processes.watchdog import stacks

file, main, (reading, writing) = stacks.show_stacks(), threading.get_native_id(), os.pipe()

def signals():
    "Each while the main thread waits, and the next one when its stacks are written; then what it waits for."
    for _ in range(5):
        before = os.fstat(file).st_size
        while open(f"/proc/self/task/{main}/stat").read().rpartition(")")[2].split()[0] != "S": pass
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR2)
        while os.fstat(file).st_size == before: pass
    os.write(writing, b"x")

threading.Thread(target=signals).start()
print(ctypes.CDLL(None).read(reading, ctypes.create_string_buffer(1), 1))  # Python's own would go on by itself
"""


@pytest.mark.skipif(sys.platform != "linux", reason="stacks are written on Linux alone")
def test_a_system_call_continues_after_stacks_are_written():
    done = subprocess.run([sys.executable, "-c", READING], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


BUSY = """
import ctypes, os, threading
from rlflow.processes.watchdog import stacks

there = threading.Barrier(4)

def turning():
    there.wait()
    while True: os.fspath(open(os.devnull, encoding="utf-8").name)  # frames that come and go

def waiting():
    there.wait()
    threading.Event().wait()

def keeping_the_lock(): ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)

for target in (turning, turning, waiting): threading.Thread(target=target, daemon=True).start()
print(stacks.show_stacks(), flush=True)
told = input()
turning() if told == "turn" else (there.wait(), keeping_the_lock())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="stacks are written on Linux alone")
@pytest.mark.parametrize(("told", "main"), [("turn", "turning"), ("keep the lock", "keeping_the_lock")])
def test_each_thread_writes_its_own_stack(told, main, monkeypatch):
    monkeypatch.setattr(stacks, "SECONDS", 60.0)  # enough for a slow machine
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            file = int(process.stdout.readline())
            process.stdin.write(f"{told}\n")
            process.stdin.flush()
            while f"in {main}" not in stacks.written(process.pid, file).split(stacks.HEADER)[-1]:
                assert process.poll() is None
            for _ in range(50):
                *others, last = stacks.written(process.pid, file).split(stacks.HEADER)[1:]
                assert f"in {main}" in last  # that of the main thread
                assert sorted(
                    name for other in others for name in ("turning", "waiting") if f"in {name}\n" in other
                ) == ["turning", "turning", "waiting"]
        finally:
            process.kill()
    assert stacks.written(process.pid, file) == ""
