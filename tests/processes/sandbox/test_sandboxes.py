"""The limits of the sandbox, tested by processes that try to break them, and the detection of missing
limits."""

import json
import os
import subprocess
import sys

import pytest

from rlflow.processes.sandbox import kernel, limits, probe, sandboxes

walled = pytest.mark.skipif(probe.missing() != (), reason="this kernel lacks a wall")


def within(code, *words):
    """Run code in a process with a folder of its own and return its output."""
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


TRYING = """
import ctypes, json, os, resource, socket, sys, threading
from rlflow.processes.sandbox import sandboxes
folder = sys.argv[1]
def clone():
    ctypes.set_errno(0)
    return ctypes.CDLL(None, use_errno=True).fork()
sandboxes.around_scorers(folder)
{more}
def refused(action):
    try:
        action()
    except (OSError, RuntimeError, ValueError):
        return True
    return False
def forks():
    if os.fork() == 0:
        os._exit(0)
    os.wait()
def thread():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
print(json.dumps([name for name, action in {
    "socket": socket.socket, "pair": socket.socketpair, "exec": lambda: os.execv("/bin/true", ["true"]),
    "chmod": lambda: os.chmod(folder, 0o700), "fork": forks, "thread": thread,
    "write": lambda: open(os.path.join(folder, "file"), "w").write("x"), "null": lambda: open("/dev/null", "w").write("x"),
    "elsewhere": lambda: open(folder + ".elsewhere", "w"), "limit": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (10, 10)),
    "read": lambda: open(__import__("rlflow").__file__).read(),
}.items() if refused(action)]))
"""


@walled
def test_a_scorer_can_only_compute_read_and_fork(tmp_path):
    assert within(TRYING.replace("{more}", ""), str(tmp_path)) == ["socket", "exec", "chmod", "elsewhere"]


@walled
def test_a_child_that_scores_answers_cannot_fork_or_write(tmp_path):
    found = within(TRYING.replace("{more}", "sandboxes.around_answers()"), str(tmp_path))
    assert set(found) >= {"socket", "exec", "chmod", "elsewhere", "fork", "limit"}
    assert not {"thread", "read", "null", "pair"} & set(found)


@pytest.mark.parametrize(
    ("kind", "broken", "lacks"),
    [
        ("scorers", "", set()),
        ("scorers", "kernel.refuse = lambda *a, **k: False", {"network", "programs", "signals"}),
        ("scorers", "kernel.only_change = lambda *a: False", {"files", "processes"}),
        ("scorers", "limits.take = lambda *a: None", {"limits"}),
        ("code", "", set()),
        (
            "code",
            "kernel.refuse = lambda *a, **k: False",
            {"network", "signals", "outliving the server", "shared memory"},
        ),
        ("code", "kernel.only_read = lambda *a: False", {"files", "processes", "reading"}),
    ],
)
@walled
def test_a_missing_limit_is_detected(tmp_path, kind, broken, lacks):
    code = f"from rlflow.processes.sandbox import kernel, limits, probe\n{broken}\nprobe.main()"
    stand = set(within(code, str(tmp_path), kind))
    missing = set(probe.around(kind)) - stand
    # which other limits block too
    assert missing - {"signals", "processes"} == lacks - {"signals", "processes"}


def test_a_limit_of_the_kernel_is_not_reported_missing():
    code = (
        "import json\nfrom rlflow.processes.sandbox import kernel\nkernel.no_new_privileges()\n"
        "print(json.dumps([kernel.only_change([]), kernel.refuse(kernel.NETWORK)]))"
    )
    assert within(code) == [wall not in probe.missing() for wall in ("files", "network")]


def test_a_machine_that_cannot_be_tested_has_no_limits(monkeypatch):
    probe.missing.cache_clear()
    monkeypatch.setattr("sys.executable", "/nothing")
    assert probe.missing() == tuple(probe.SANDBOX)
    assert probe.lines()[-2].endswith("need --unsafe-scorers")
    assert probe.lines()[-1].endswith("need --unsafe")
    probe.missing.cache_clear()


def test_the_environment_has_no_secrets_and_its_own_home(monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "canary")
    monkeypatch.setenv("MKL_NUM_THREADS", "2")
    found = limits.environment("/own")
    assert (found["HOME"], found["TMPDIR"], found["MKL_NUM_THREADS"]) == ("/own", "/own", "2")
    assert "SOME_TOKEN" not in found
    assert limits.environment("/own", ["SOME_TOKEN", "ABSENT"])["SOME_TOKEN"] == "canary"


def test_threads_of_this_user_are_counted():
    assert limits.threads() >= len(os.listdir("/proc/self/task"))


def test_each_known_architecture_refuses_escaping_calls():
    for machine, numbers in kernel.NUMBERS.items():
        assert {"socket", "io_uring_setup", "execve", "execveat", "ptrace", "clone", "clone3", "kill"} <= set(
            numbers
        ), machine
        assert machine in kernel.ARCHITECTURES
        assert len(set(numbers.values())) == len(numbers)
    assert sandboxes.SHARE < 1
