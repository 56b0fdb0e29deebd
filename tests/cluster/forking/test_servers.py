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
from rlflow.processes.watchdog import process_tag

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
def start_client(tmp_path):
    """``asking(*words, **variables)``: a client that lets the server of this process run the script."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = servers.executable(tmp_path, ["wave"], 1)
    assert command is not None
    started = []

    def start(*words, **variables):
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

    start.command, start.script = command, str(tmp_path / "script.py")
    yield start
    for process in started:
        with process:
            process.kill()


def facts(process):
    return json.loads(process.stdout.readline())


def server():
    return servers._servers[-1].process.pid


def test_a_fork_has_the_files_words_folder_and_environment_of_its_client(start_client, tmp_path):
    process = start_client("one", "two", COLOUR="blue")
    was = facts(process)
    assert (was["parent"], was["words"], was["folder"]) == (server(), ["one", "two"], str(tmp_path))
    assert (was["colour"], was["name"], was["loaded"]) == ("blue", "__main__", ["wave"])
    assert was["pid"] != process.pid
    # packages imported by the server may print when they end
    assert process.communicate()[1].startswith("to stderr")
    assert process.returncode == 7


def test_killing_the_process_group_of_a_fork_ends_only_that_fork(start_client):
    """Ray kills the process group of a dead worker."""
    one, other = start_client("wait"), start_client("wait")
    pids = [facts(each)["pid"] for each in (one, other)]
    assert [os.getpgid(pid) for pid in pids] == pids
    os.killpg(pids[0], signal.SIGKILL)
    assert one.wait() == -signal.SIGKILL
    other.communicate("")
    assert other.returncode == 7


def test_each_fork_draws_different_random_numbers(start_client):
    assert facts(start_client())["draw"] != facts(start_client())["draw"]


@pytest.mark.parametrize("mark", ["abc", "outer/inner", ""])
def test_a_fork_and_its_children_carry_only_the_mark_of_the_run(start_client, mark):
    was = facts(process := start_client("wait", RLFLOW_RUN=mark))
    assert was["mark"] == mark
    for name in filter(None, mark.split("/")):
        assert process_tag.marked(name) == [process.pid, was["pid"]]


def test_a_client_with_a_too_long_mark_runs_without_a_fork(start_client):
    assert facts(process := start_client(RLFLOW_RUN="x" * 600))["pid"] == process.pid


def test_the_client_ends_like_its_fork(start_client):
    process = start_client("die")
    assert process.wait() == -signal.SIGKILL


def test_a_fork_is_killed_with_its_client(start_client):
    process = start_client("wait")
    pid = facts(process)["pid"]
    process.kill()
    until(lambda: not process_tag.started(pid))


def test_a_client_that_leaves_early_does_not_end_the_server(start_client):
    known = json.loads(Path(shlex.split(start_client.command)[-1]).read_text())
    first = server()
    for _ in range(20):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(known["address"])
            send(connection, Request(known["key"], [], [start_client.script, "wait"], {}, "/"), [0, 1, 2])
    assert facts(start_client())["parent"] == first
    until(lambda: not [pid for pid, _ in process_tag.descendants(first) if process_tag.started(pid)])


def test_forks_die_with_their_server_and_the_next_run_starts_one(start_client, tmp_path):
    process, first = start_client("wait"), server()
    pid = (was := facts(process))["pid"]
    assert was["parent"] == first
    os.kill(first, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    until(lambda: not process_tag.started(pid))
    assert facts(alone := start_client())["pid"] == alone.pid, "without a server it is a process as any other"
    servers.executable(tmp_path, ["wave"], 1)
    assert server() != first
    assert facts(start_client())["parent"] == server()


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
        assert process_tag.started(pid)
        process.kill()
        until(lambda: not process_tag.started(pid))


def test_a_server_serves_one_environment_and_few_servers_stay(tmp_path, monkeypatch):
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
    assert process_tag.started(first)


def test_a_client_with_another_environment_gets_no_fork(start_client, monkeypatch):
    assert facts(process := start_client(HF_HOME="/elsewhere"))["pid"] != process.pid, (
        "the server has none, and read none"
    )
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    servers.executable(Path(shlex.split(start_client.command)[-1]).parent, [], 1)
    assert facts(process := start_client(HF_HOME="/elsewhere"))["parent"] == server()
    assert facts(process := start_client(HF_HOME="/another"))["pid"] == process.pid


def test_a_request_with_another_key_gets_nothing(start_client, tmp_path):
    known = json.loads((tmp_path / "forks.json").read_text())
    (tmp_path / "forks.json").write_text(json.dumps({**known, "key": "0" * 64}))
    assert facts(process := start_client())["pid"] == process.pid


def test_other_users_cannot_read_the_key(start_client, tmp_path):
    assert (tmp_path / "forks.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("noise", [b"", b"\0", b"\0\0\0\2[]", b"\xff\xff\xff\xff", b'\0\0\0\x0c{"key": "x"}'])
def test_noise_on_its_socket_does_not_end_a_server(start_client, tmp_path, noise):
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(json.loads((tmp_path / "forks.json").read_text())["address"])
        connection.sendall(noise)
    assert facts(start_client())["parent"] == server()
