import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import until

from rlflow.cluster.forking import servers
from rlflow.cluster.forking.request import Request, send
from rlflow.processes.watchdog import kin

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not

SCRIPT = """
import json, os, sys
print(json.dumps({"pid": os.getpid(), "parent": os.getppid(), "words": sys.argv[1:], "folder": os.getcwd(), "name": __name__,
                  "colour": os.environ.get("COLOUR"), "loaded": [name for name in ("wave", "ray") if name in sys.modules],
                  "mark": os.environ.get("RLFLOW_RUN"), "draw": __import__("random").random()}), flush=True)
sys.stderr.write("to stderr")
if "wait" in sys.argv:
    sys.stdin.read()
if "die" in sys.argv:
    os.kill(os.getpid(), 9)
sys.exit(7)
"""


@pytest.fixture
def asking(tmp_path):
    """``asking(*words, **variables)``: a client that has the script run by this process's server."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = servers.executable(tmp_path, ["wave"], 1)
    assert command is not None
    started = []

    def ask(*words, **variables):
        process = subprocess.Popen(
            [*shlex.split(command), f"{tmp_path}/script.py", *words],
            text=True,
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **variables},
        )
        started.append(process)
        return process

    ask.command, ask.script = command, str(tmp_path / "script.py")
    yield ask
    for process in started:
        with process:
            process.kill()


def facts(process):
    return json.loads(process.stdout.readline())


def server():
    return servers._servers[-1].process.pid


def test_a_process_is_a_fork_of_the_server_with_the_files_words_folder_and_environment_of_who_asked(
    asking, tmp_path
):
    process = asking("one", "two", COLOUR="blue")
    was = facts(process)
    assert (was["parent"], was["words"], was["folder"]) == (server(), ["one", "two"], str(tmp_path))
    assert (was["colour"], was["name"], was["loaded"]) == ("blue", "__main__", ["wave"])
    assert was["pid"] != process.pid
    # packages that the server has imported may say something at the end
    assert process.communicate()[1].startswith("to stderr")
    assert process.returncode == 7


def test_the_end_of_a_forks_process_group_is_the_end_of_that_fork_alone(asking):
    """Ray ends the process group of a worker that has died."""
    one, other = asking("wait"), asking("wait")
    pids = [facts(each)["pid"] for each in (one, other)]
    assert [os.getpgid(pid) for pid in pids] == pids
    os.killpg(pids[0], signal.SIGKILL)
    assert one.wait() == -signal.SIGKILL
    other.communicate("")
    assert other.returncode == 7


def test_each_fork_draws_numbers_of_its_own(asking):
    assert facts(asking())["draw"] != facts(asking())["draw"]


@pytest.mark.parametrize("mark", ["abc", "outer/inner", ""])
def test_a_fork_and_its_own_forks_have_the_mark_of_the_run_alone(asking, mark):
    was = facts(process := asking("wait", RLFLOW_RUN=mark))
    assert was["mark"] == mark
    for name in filter(None, mark.split("/")):
        assert kin.marked(name) == [process.pid, was["pid"]]


def test_a_mark_that_is_too_long_for_a_fork_is_kept_by_a_process_without_a_fork(asking):
    assert facts(process := asking(RLFLOW_RUN="x" * 600))["pid"] == process.pid


def test_who_asked_ends_as_the_fork_did(asking):
    process = asking("die")
    assert process.wait() == -signal.SIGKILL


def test_a_fork_is_killed_with_who_asked(asking):
    process = asking("wait")
    pid = facts(process)["pid"]
    process.kill()
    until(lambda: not kin.started(pid))


def test_who_goes_away_while_it_asks_ends_no_server(asking):
    known = json.loads(Path(shlex.split(asking.command)[-1]).read_text())
    first = server()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(known["address"])
            send(connection, Request(known["key"], [], [asking.script, "wait"], {}, "/"), [0, 1, 2])
    assert facts(asking())["parent"] == first
    until(lambda: not [pid for pid, _ in kin.descendants(first) if kin.started(pid)])


def test_forks_are_killed_with_their_server_and_the_next_run_has_another(asking, tmp_path):
    process, first = asking("wait"), server()
    pid = (was := facts(process))["pid"]
    assert was["parent"] == first
    os.kill(first, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until(lambda: not kin.started(pid))
    assert facts(alone := asking())["pid"] == alone.pid, "without a server it is a process as any other"
    servers.executable(tmp_path, ["wave"], 1)
    assert server() != first
    assert facts(asking())["parent"] == server()


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    code = (
        "import sys; from pathlib import Path; from rlflow.cluster.forking import servers; "
        "servers.executable(Path(sys.argv[1]), [], 1); print(servers._servers[-1].process.pid, "
        "flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        pid = int(process.stdout.readline())
        assert kin.started(pid)
        process.kill()
        until(lambda: not kin.started(pid))


def test_a_server_serves_runs_of_one_environment_and_few_are_kept(tmp_path, monkeypatch):
    servers.executable(tmp_path, [], 1)
    first = server()
    servers.executable(tmp_path, [], 2)
    assert server() != first
    servers.executable(tmp_path, [], 1)
    assert server() == first
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    servers.executable(tmp_path, [], 1)
    assert len(servers._servers) == servers.KEPT
    assert server() != first
    assert kin.started(first)


def test_a_process_with_another_environment_than_the_server_imported_with_is_no_fork(asking, monkeypatch):
    assert facts(process := asking(HF_HOME="/elsewhere"))["pid"] != process.pid, (
        "the server has none, and read none"
    )
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    servers.executable(Path(shlex.split(asking.command)[-1]).parent, [], 1)
    assert facts(process := asking(HF_HOME="/elsewhere"))["parent"] == server()
    assert facts(process := asking(HF_HOME="/another"))["pid"] == process.pid


def test_a_request_with_another_key_gets_nothing(asking, tmp_path):
    known = json.loads((tmp_path / "forks.json").read_text())
    (tmp_path / "forks.json").write_text(json.dumps({**known, "key": "0" * 64}))
    assert facts(process := asking())["pid"] == process.pid


def test_the_key_is_no_other_users_to_read(asking, tmp_path):
    assert (tmp_path / "forks.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("noise", [b"", b"\0", b"\0\0\0\2[]", b"\xff\xff\xff\xff", b'\0\0\0\x0c{"key": "x"}'])
def test_noise_on_its_socket_does_not_end_a_server(asking, tmp_path, noise):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(json.loads((tmp_path / "forks.json").read_text())["address"])
        connection.sendall(noise)
    assert facts(asking())["parent"] == server()
