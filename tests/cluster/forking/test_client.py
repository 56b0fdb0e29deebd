import json
import signal
import socket
import subprocess
import sys

import pytest

from rlflow.cluster.forking import client
from rlflow.cluster.forking.request import REPLY

SCRIPT = "import os, sys; print(os.getpid(), sys.argv[1:], bool(sys.flags.isolated)); sys.exit(3)"


@pytest.mark.parametrize(
    "introduction",
    [
        None,
        "{",
        "[]",
        "{}",
        json.dumps({"address": "\0rlflow-nobody", "key": "", "modules": []}),
        json.dumps({"address": 7, "key": "", "modules": []}),
    ],
)
def test_without_a_server_the_client_becomes_the_worker(tmp_path, introduction):
    (tmp_path / "script.py").write_text(SCRIPT)
    if introduction is not None:
        (tmp_path / "forks.json").write_text(introduction)
    words = [
        sys.executable,
        "-I",
        "-S",
        client.__file__,
        str(tmp_path / "forks.json"),
        str(tmp_path / "script.py"),
        "a word",
        "--flag",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0].split(maxsplit=1) == [
            str(process.pid),
            "['a word', '--flag'] False\n",
        ]
    assert process.returncode == 3


def test_a_fork_dies_with_its_server():
    near, far = socket.socketpair()
    with far:
        near.close()
        assert client.status_of(far) == signal.SIGKILL


@pytest.mark.parametrize("status", [0, 7 << 8, signal.SIGKILL])
def test_the_server_reports_the_exit_of_a_fork(status):
    near, far = socket.socketpair()
    with near, far:
        near.sendall(REPLY.pack(status))
        assert client.status_of(far) == status
