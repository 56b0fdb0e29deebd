"""Processes inspected and ended from outside: running, suspended, gone, and with a reused process id."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from rlflow.cluster.health import postmortem
from rlflow.cluster.health.heartbeat import ProcessInfo
from rlflow.cluster.health.postmortem import ProcessState, kill, look, wait_or_kill
from rlflow.processes.process import Process
from rlflow.processes.watchdog import process_tag


def present(child):
    return ProcessInfo(
        replace(Process.this(), pid=child.pid, started=process_tag.stat(child.pid).started), "node"
    )


def reached(child, state):
    while process_tag.stat(child.pid).state != state:
        time.sleep(0.001)


@pytest.fixture
def child():
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def stopped(child):
    os.kill(child.pid, signal.SIGSTOP)
    reached(child, "T")
    return child


def test_a_suspended_process_is_recognised(stopped):
    presence = present(stopped)
    assert look(presence) == ProcessState("T")
    assert str(look(presence)) == "is stopped (SIGSTOP)"
    os.kill(stopped.pid, signal.SIGCONT)
    reached(stopped, "S")
    assert str(look(presence)) == "is alive but not responding"


def test_a_suspended_process_is_killed(stopped):
    presence = present(stopped)
    assert kill(presence)
    assert stopped.wait(10) == -signal.SIGKILL
    assert look(presence) == ProcessState("")
    assert str(look(presence)) == "has died"


def test_a_dead_process_needs_no_kill(child):
    presence = present(child)
    child.kill()
    child.wait()
    assert kill(presence)
    assert wait_or_kill(presence)


def test_a_process_with_a_reused_id_is_left_alone(child):
    earlier = replace(present(child), process=replace(present(child).process, started="1"))
    assert kill(earlier)  # the process that was meant is gone
    assert look(earlier) == ProcessState("")
    assert child.poll() is None


def test_an_ending_process_gets_time_and_is_killed_if_it_stays(monkeypatch):
    ending = subprocess.Popen(["sleep", "0.2"])
    assert wait_or_kill(present(ending))
    assert ending.wait(10) == 0
    staying = subprocess.Popen(["sleep", "600"])
    monkeypatch.setattr(postmortem, "LEAVING_SECONDS", 0.1)
    assert wait_or_kill(present(staying))
    assert staying.wait(10) == -signal.SIGKILL


def test_a_process_is_not_reported_gone_before_it_is(monkeypatch):
    """The process is this one, and nothing signals it: the observer takes it for a process of another
    machine."""
    monkeypatch.setattr(postmortem, "GONE_SECONDS", 0.05)
    elsewhere = ProcessInfo(replace(Process.this(), host="another", boot="another"), "node")
    assert not kill(elsewhere)


HANGS = '''
import sys, time
from rlflow.processes.watchdog.stacks import show_stacks
print(show_stacks(), flush=True)
exec(compile("""
def outermost():
    inner()

def inner():
    time.sleep(600)

class Host:
    def {method}(self):
        outermost()

Host().{method}()
""", "{file}", "exec"))
'''


@pytest.mark.parametrize(("method", "shown"), [("do", True), ("_run", True), ("listen", False)])
def test_the_shown_stack_begins_in_the_called_method(method, shown):
    command = [sys.executable, "-c", HANGS.format(method=method, file=f"/somewhere/{postmortem.HOST}")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        presence = replace(present(process), stacks=int(process.stdout.readline()))
        reached(process, "S")
        stacks = look(presence).stacks
        process.kill()
    found = [line.rpartition(" in ")[2] for line in stacks.splitlines()]
    assert found == (["inner", "outermost"] if shown else [])
