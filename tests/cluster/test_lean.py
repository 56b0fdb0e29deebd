"""The options that a run's local Ray is started with. If Ray looks different from what is expected, it is
started as usual."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray  # noqa: F401  the test reads its private modules
from processes import until

from rlflow.cluster import ray_private
from rlflow.cluster.lean import STAND_IN, WorkerStart
from rlflow.processes.watchdog import process_tag

NODE, SERVICES = sys.modules["ray._private.node"].Node, sys.modules["ray._private.services"]
STAND_IN_COMMAND = f"{sys.executable} -I -S {STAND_IN}"


SETUP = str(Path(sys.modules["ray._private.node"].__file__).parent / "workers" / "setup_worker.py")
FLAGS, NODE_ID = "default_worker.py --webui= PLACEHOLDER", "ab" * 28


@pytest.fixture
def raylet(tmp_path):
    """The relevant part of a raylet's command as Ray builds it. ``raylet(python)``: with another Python."""

    def command(python=sys.executable):
        return [
            "/ray/raylet",
            f"--python_worker_command={python} {SETUP} {FLAGS}",
            "--dashboard_agent_command=python agent.py",
            "--labels=",
            "--runtime_env_agent_command=python main.py",
            f"--session_dir={tmp_path}",
            f"--node_id={NODE_ID}",
        ]

    return command


@pytest.mark.parametrize(
    ("python", "worker"),
    [
        ("/python -I client.py forks.json", f"/python {SETUP} -I client.py forks.json"),
        (None, f"{sys.executable} {SETUP}"),
    ],
)
def test_the_raylet_gets_our_worker_command_and_stand_ins_for_its_agents(raylet, python, worker, tmp_path):
    """The raylet drops the second word, as for all workers without a runtime_env."""
    assert WorkerStart(1, python).command(raylet()) == [
        "/ray/raylet",
        f"--python_worker_command={worker} {FLAGS}",
        f"--dashboard_agent_command={STAND_IN_COMMAND}",
        "--labels=",
        f"--runtime_env_agent_command={STAND_IN_COMMAND}",
        f"--session_dir={tmp_path}",
        f"--node_id={NODE_ID}",
    ]
    ports = (
        "metrics_agent_port",
        "metrics_export_port",
        "dashboard_agent_listen_port",
        "runtime_env_agent_port",
    )
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        [f"{port}_{NODE_ID}" for port in ports], "-1"
    )


@pytest.mark.parametrize("start", [WorkerStart(1, "/python client.py"), WorkerStart(1)])
@pytest.mark.parametrize(
    "missing", ["python_worker_command", "dashboard_agent_command", "runtime_env_agent_command", "node_id"]
)
def test_a_raylet_without_an_expected_flag_is_started_as_usual(raylet, start, missing):
    assert start.command([word for word in raylet() if not word.startswith(f"--{missing}=")]) is None


def test_a_raylet_with_another_worker_command_starts_as_usual(raylet):
    assert WorkerStart(1, "/python client.py").command(raylet("/usr/bin/pypy")) is None
    assert WorkerStart(1, "/python client.py", agents=True).command(raylet()) is None


def test_ray_is_restored_after_its_start():
    before = [getattr(NODE, name) for name in ray_private.UNUSED], SERVICES.start_ray_process
    with WorkerStart(1).applied():
        assert SERVICES.start_ray_process is not before[1]
    assert ([getattr(NODE, name) for name in ray_private.UNUSED], SERVICES.start_ray_process) == before


def test_a_ray_without_an_expected_method_is_started_as_usual(monkeypatch):
    monkeypatch.delattr(NODE, "start_monitor")
    original, start = SERVICES.start_ray_process, WorkerStart(1)
    with start.applied():
        assert SERVICES.start_ray_process is original
    assert not start.built_in


def test_a_stand_in_waits_until_its_raylet_ends():
    code = f"import subprocess; subprocess.Popen({shlex.split(STAND_IN_COMMAND)}).wait()"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        [(pid, start)] = until(lambda: process_tag.descendants(parent.pid))
        # it waits
        until(
            lambda: (
                b"stand_in.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
                and process_tag.stat(pid).state == "S"
            )
        )
        assert parent.poll() is None
        parent.send_signal(signal.SIGKILL)
        until(lambda: not process_tag.lives(pid, start))
