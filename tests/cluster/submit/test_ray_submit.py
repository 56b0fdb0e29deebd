"""The command line of `rlflow job --for ray`, on a real Ray with its job server: submit a run, read its
status and log, and stop it."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile

import pytest
from install import JOB_SERVER
from started import marked, until

from rlflow.cli.job import print_job

SECONDS = 120.0
FLAGS = [
    "--for",
    "ray",
    "--backend",
    "null",
    "--prompts",
    "2",
    "--hp.samples",
    "2",
    "--hp.max_tokens",
    "4",
    "--job.secret",
    "OF_MINE",
]
SCRIPTS = {
    "ray": "from ray.scripts.scripts import main; main()",
    "rlflow": "from rlflow.cli.main import main; main()",
}


@pytest.fixture
def own_place():
    """A folder for a Ray's files, with a path short enough for its sockets. Ray finds the Ray of a job by a
    file there; in the usual folder, another Ray of this machine could have written it."""
    folder = tempfile.mkdtemp(prefix="rj", dir="/tmp")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shell(tmp_path, own_place, lacking):
    """Run command lines next to a Ray whose job server listens on the loopback address, and return their
    output. ``address``: of the server."""
    if not JOB_SERVER.exists():
        lacking("Ray's job server is not installed")
    (commands := tmp_path / "bin").mkdir()
    (work := tmp_path / "work").mkdir()
    for name, code in SCRIPTS.items():
        (commands / name).write_text(f'#!/bin/sh\nexec {JOB_SERVER} -c "{code}" "$@"\n')
        (commands / name).chmod(0o700)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "PATH": f"{commands}:{JOB_SERVER.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(16),
        "OF_MINE": "shown to nobody",
        "OMP_NUM_THREADS": "1",
        "RAY_TMPDIR": own_place,
    }
    words = [
        "ray",
        "start",
        "--head",
        "--block",
        "--port=0",
        "--num-cpus=2",
        "--node-ip-address=127.0.0.1",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={port}",
        "--include-dashboard=true",
        "--disable-usage-stats",
        "--object-store-memory=134217728",
    ]
    head = subprocess.Popen(
        words,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )

    def ran(line):
        done = subprocess.run(
            ["bash", "-c", line],
            env=environment,
            cwd=work,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        return done.stdout + done.stderr

    def listens():
        assert head.poll() is None, head.stdout.read()
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", port)) == 0

    ran.address = f"http://127.0.0.1:{port}"
    try:
        assert until(listens, SECONDS)
        yield ran
    finally:
        # of its HOME: `ray stop` would end every Ray of this machine
        for line in marked(str(tmp_path).encode()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.split()[0]), signal.SIGKILL)
        head.communicate()


def submitted(shell, capsys, *flags):
    """Return the id and the output of a job submitted by the printed line."""
    print_job("grpo", [*FLAGS, "--job.address", shell.address, *flags])
    line = capsys.readouterr().out
    assert "shown to nobody" not in line
    return line


@pytest.mark.long
def test_a_run_can_be_submitted_read_and_stopped(shell, capsys):
    at = f"--address {shell.address}"
    said = shell(submitted(shell, capsys, "--name", "quick", "--iterations", "2", "--pools", "all=1"))
    assert "succeeded" in said, said
    name = next(word.strip("'\"") for word in said.split() if word.strip("'\"").startswith("quick-"))
    assert "SUCCEEDED" in shell(f"ray job status {at} {name}").upper()
    log = shell(f"ray job logs {at} {name}")
    assert "joining the Ray at auto" in log, log

    line = submitted(shell, capsys, "--name", "long", "--iterations", "100000", "--generate_seconds", "0.2")
    said = shell(line.replace("ray job submit", "ray job submit --no-wait", 1))
    name = next(word.strip("'\"") for word in said.split() if word.strip("'\"").startswith("long-"))
    assert until(lambda: "iteration" in shell(f"ray job logs {at} {name}"), SECONDS)
    assert "STOPPED" in (shell(f"ray job stop {at} {name}") + shell(f"ray job status {at} {name}")).upper()
