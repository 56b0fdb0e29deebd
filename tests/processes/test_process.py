"""A process is identified by its pid, its start and its machine. Its state is unknown if it cannot be
seen."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from rlflow.processes.process import Process, parsed
from rlflow.processes.watchdog import process_tag


@pytest.fixture
def child():
    """A waiting child, and its identity."""
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process, replace(Process.this(), pid=process.pid, started=process_tag.started(process.pid))
        process.communicate(b"\n")


def test_a_running_or_suspended_process_is_alive(child):
    process, identity = child
    assert identity.alive()
    process.send_signal(signal.SIGSTOP)
    assert identity.alive()
    process.send_signal(signal.SIGCONT)


def test_a_process_waiting_to_be_reaped_is_dead():
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as process:
        identity = replace(Process.this(), pid=process.pid, started=process_tag.started(process.pid))
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert identity.alive() is False
        assert process_tag.started(process.pid) == ""
        assert not process_tag.lives(process.pid, "")


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({"started": "1"}, False),
        ({"boot": "earlier"}, False),
        ({"space": "1"}, None),
        ({"host": "elsewhere", "boot": "other"}, None),
        ({"started": ""}, True),
        ({"started": "", "pid": 2**22 + 1}, False),
    ],
)
def test_a_pid_of_another_start_machine_or_container_is_not_this_process(changes, alive):
    assert replace(Process.this(), **changes).alive() is alive


def test_an_identity_is_read_back_from_json_and_from_a_file_name():
    own = Process.this()
    assert parsed(json.loads(own.as_json())) == own
    assert Process.of_tag(own.tag()) == own


@pytest.mark.parametrize(
    "values", [None, [], {}, {"pid": "1"}, {"pid": 1, "started": "1", "boot": "", "space": ""}]
)
def test_an_invalid_identity_is_none(values):
    assert parsed(values) is None


@pytest.mark.parametrize("tag", ["", "12", "12.34", "x.1.2"])
def test_an_invalid_tag_is_no_process(tag):
    assert Process.of_tag(tag) is None
