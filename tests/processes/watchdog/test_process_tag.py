"""All processes of a run are found, even if they hide, and ended; other processes are not."""

import io
import os
import secrets
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import gone, until

from rlflow.processes.watchdog import process_tag

NAMES = st.text("0123456789abcdef", min_size=1, max_size=8)
DAEMON = (
    "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nprint(os.getpid(), "
    "flush=True)\ntime.sleep(600)"
)


@given(st.lists(NAMES, unique=True, max_size=5), NAMES)
def test_names_are_added_to_and_removed_from_the_mark(others, name):
    value = ""
    for each in others:
        value = process_tag.marks(each, value)
    assert value == "/".join(others)
    rest = [each for each in others if each != name]
    assert process_tag.without(name, process_tag.marks(name, value)) == "/".join(rest)


def started(name, *words):
    """A process with this mark."""
    return subprocess.Popen(
        words, env={**os.environ, process_tag.MARK: name}, stdout=subprocess.PIPE, text=True
    )


def test_processes_with_a_name_in_their_mark_are_found():
    name, other = secrets.token_hex(8), secrets.token_hex(8)
    plain, within, foreign = (
        started(mark, "sleep", "600") for mark in (name, f"x/{name}/y", f"{name}{other}")
    )
    daemon = started(name, sys.executable, "-S", "-c", DAEMON)
    try:
        pid = int(daemon.stdout.readline())
        # its parent may still exist
        until(lambda: sorted(process_tag.marked(name)) == sorted([plain.pid, within.pid, pid]))
        assert process_tag.end_all(lambda: process_tag.marked(name)) == []
        assert all(map(gone, (plain.pid, within.pid, pid)))
        assert foreign.poll() is None
    finally:
        process_tag.end_all(lambda: process_tag.marked(name))
        for process in (plain, within, foreign, daemon):
            process.kill()
            process.communicate()


def test_ray_processes_are_found_by_their_open_files(tmp_path):
    """Their titles may overwrite their marks. Other processes with a title, possibly the caller itself, are
    left alone."""
    folder, other = tmp_path / "run", tmp_path / "runs"
    for where in (folder, other):
        where.mkdir()
    code = (
        "import sys\nfile = open(sys.argv[1], 'w')\nprint('there', flush=True)\nimport time\ntime.sleep(600)"
    )
    of = [("ray::Agent", folder), ("ray::Agent", other), ("driver", folder)]
    processes = [
        subprocess.Popen(
            [title, "-c", code, where / "agent.log"],
            executable=sys.executable,
            stdout=subprocess.PIPE,
            text=True,
        )
        for title, where in of
    ]
    try:
        assert [process.stdout.readline() for process in processes] == ["there\n"] * 3
        assert process_tag.of_ray([str(folder)]) == [processes[0].pid]
        assert process_tag.of_ray([]) == []
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_process_that_keeps_starting_others_is_ended():
    name = secrets.token_hex(8)
    breeding = (
        "import os, time\nfor _ in range(30):\n    if os.fork() == 0: time.sleep(600)\n    "
        "time.sleep(0.01)\ntime.sleep(600)"
    )
    process = started(name, sys.executable, "-S", "-c", breeding)
    until(lambda: len(process_tag.marked(name)) > 3)
    assert process_tag.end_all(lambda: process_tag.marked(name)) == []
    assert process_tag.marked(name) == []
    process.communicate()


def test_a_process_that_ends_itself_may_finish_its_work(tmp_path):
    name, path = secrets.token_hex(8), tmp_path / "wandb-core"
    path.symlink_to("/bin/sleep")
    process = started(name, path, "600")
    try:
        assert process_tag.marked(name) == []
        assert process_tag.left_alone(process.pid)
    finally:
        process.kill()
        process.communicate()


def test_descendants_are_found_by_pid_and_start():
    shell = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    try:
        child = int(shell.stdout.readline())
        found = process_tag.descendants(os.getpid())
        assert {shell.pid, child} <= {pid for pid, _ in found}
        assert [pid for pid, _ in process_tag.descendants(shell.pid)] == [child]
        assert process_tag.still([(child, process_tag.stat(child).started), (shell.pid, "1")]) == [child]
    finally:
        os.kill(child, signal.SIGKILL)
        shell.communicate()
    assert not {shell.pid, child} & set(process_tag.still(found))
    assert process_tag.stat(shell.pid) is None


@pytest.mark.parametrize(
    ("code", "status"), [("import os; os._exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_the_end_of_a_process_is_known_until_it_is_reaped(code, status):
    process = subprocess.Popen([sys.executable, "-S", "-c", code])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    found = process_tag.stat(process.pid)
    assert (found.state, os.waitstatus_to_exitcode(found.status)) == ("Z", status)
    assert not process_tag.lives(process.pid, found.started)
    assert process.wait() == status


def test_a_suspended_process_dies_with_its_parent(python):
    code = (
        "import os, signal, sys, time\nfrom rlflow.processes.watchdog import process_tag\nparent = os.getpid()\npid "
        "= os.fork()\nif pid == 0:\n    process_tag.die_with(parent)\n    print(os.getpid(), flush=True)\n    "
        "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(600)"
    )
    process = python(code)
    child = int(process.stdout.readline())
    until(lambda: process_tag.stat(child).state == "T")
    process.kill()
    assert gone(child)


def test_processes_of_ray_die_with_their_parent(python):
    ended = subprocess.Popen(["true"])
    ended.wait()
    code = (
        "import os, time\nfrom rlflow.processes.watchdog import process_tag\npid = os.fork()\nif pid == 0:\n    "
        "os.environ[process_tag.RAYLET] = str(os.getppid())\n    process_tag.die_with_raylet()\n    print(os.getpid(), "
        "flush=True)\n    time.sleep(600)\nos.waitid(os.P_PID, pid, os.WEXITED)\ntime.sleep(600)"
    )
    process = python(code)
    child = int(process.stdout.readline())
    process.kill()
    assert gone(child)
    orphan = subprocess.run(
        [
            sys.executable,
            "-c",
            code.partition("pid = os.fork()")[0] + "process_tag.die_with_raylet()\nprint('lives')",
        ],
        env={**os.environ, process_tag.RAYLET: str(ended.pid)},
        stdout=subprocess.PIPE,
    )
    assert (orphan.returncode, orphan.stdout) == (1, b"")


def test_orphans_are_adopted(python):
    code = (
        "import os, subprocess, sys, time\nfrom rlflow.processes.watchdog import process_tag\nprocess_tag.adopt()\n"
        "pid = int(subprocess.run(['sh', '-c', 'setsid sleep 600 >&- & echo $!'], env={}, "
        "stdout=subprocess.PIPE).stdout)\n"
        "print(pid, os.getpid(), [pid for pid, _ in process_tag.descendants(os.getpid())], flush=True)\n"
        "print(process_tag.end_all(lambda: process_tag.still(process_tag.descendants(os.getpid()))))"
    )
    out, _ = python(code).communicate()
    pid = int(out.split()[0])
    assert f"[{pid}]" in out
    assert out.splitlines()[-1] == "[]"
    assert gone(pid)


@pytest.mark.parametrize(
    ("leaving", "code"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("sys.exit()", 0),
        ("sys.exit('words')", 1),
        ("raise ValueError", 1),
        ("raise KeyboardInterrupt", 1),
    ],
)
def test_a_forked_child_that_leaves_a_call_ends_there(python, leaving, code):
    text = (
        "import os, sys\nfrom rlflow.processes.watchdog import process_tag\n"
        f"with process_tag.here_alone():\n    pid = os.fork()\n    if pid == 0:\n        {leaving}\n"
        "print('out', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)"
    )
    assert python(text).communicate() == (f"out {code}\n", "")


def test_events_in_the_process_itself_are_not_changed():
    with pytest.raises(SystemExit), process_tag.here_alone():
        sys.exit(3)
    with process_tag.here_alone():
        pass


def test_a_child_within_its_exec_is_awaited(monkeypatch):
    """The kernel shows no environment until the new one is in place, which may be after the pipes of the
    parent are closed."""
    child = subprocess.Popen(
        ["sleep", "600"], env={**os.environ, process_tag.MARK: process_tag.marks("within-exec")}
    )
    reads = []

    def first_empty(path, mode):
        reads.append(path)
        return io.BytesIO(b"") if len(reads) == 1 else open(path, mode)

    monkeypatch.setattr(process_tag, "open", first_empty, raising=False)
    monkeypatch.setattr(process_tag.os, "listdir", lambda folder: [str(child.pid)])
    try:
        assert process_tag.marked("within-exec") == [child.pid]
    finally:
        child.kill()
        child.wait()


def test_the_command_of_a_process_is_its_first_word():
    words = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()  # the process runs, so the kernel shows its words
        assert process_tag.command(process.pid) == sys.executable
        process.communicate("\n")
    assert process_tag.command(process.pid) == ""
