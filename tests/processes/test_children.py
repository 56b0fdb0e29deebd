"""A child is ended with every process it has started, even if one tries to escape."""

import os
import secrets
import subprocess
import sys

from processes import gone

from rlflow.processes.children import Child
from rlflow.processes.watchdog import process_tag

# prints the pid of an orphan in a session of its own, then waits in its own way
STARTING = (
    "import os, subprocess, sys, time\nenv = {} if 'unmarked' in sys.argv else None\n"
    "far = subprocess.Popen(['sleep', '600'], start_new_session=True, env=env, stdout=subprocess.DEVNULL)\n"
    "print(far.pid, flush=True)\nif 'exits' in sys.argv: os._exit(3)\ntime.sleep(600)"
)


def started(name, *words):
    child = Child(
        [sys.executable, "-S", "-c", STARTING, *words],
        name,
        stdout=subprocess.PIPE,
        env={**os.environ, process_tag.MARK: name},
    )
    return child, int(child.stdout.readline())


def test_a_child_ends_with_all_processes_that_have_its_mark():
    child, far = started(secrets.token_hex(8), "exits")
    assert child.wait(60) == 3
    with child.stdout:
        child.end()
    assert gone(far)
    assert child.returncode == 3


def test_noted_processes_end_without_a_mark():
    child, far = started(secrets.token_hex(8), "unmarked")
    child.note_descendants()
    child.signal_group()
    with child.stdout:
        child.end()
    assert gone(far)
    child.note_descendants()  # nothing more can be noted, and no process gets a signal
    child.signal_group()


def test_a_child_without_a_name_ends_alone():
    with subprocess.Popen(["sleep", "600"]) as other:
        child = Child(["sleep", "600"])
        assert os.getsid(child.pid) == child.pid
        child.end()
        assert gone(child.pid)
        assert other.poll() is None
        other.kill()
