"""The place of the sockets of a run on pools, and the address of a Ray that the run starts."""

import os
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
import ray  # noqa: F401  the test reads its constants

from rlflow.cluster import Job, launch
from rlflow.errors import PlanError
from rlflow.processes.watchdog import private
from rlflow.processes.watchdog.signals import ending_at_once

NAME = "0123456789abcdef"  # as long as that of a run


@pytest.fixture
def temporary(monkeypatch):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)

    def use(folder):
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr("tempfile.tempdir", str(folder))

    return use


def test_ray_sockets_fit_in_any_temporary_folder(tmp_path, temporary):
    temporary(tmp_path / ("x" * 90))
    folder = launch.run_folder(NAME, None)
    # the largest pid
    socket = f"{folder}/{launch.RAY}/session_2026-01-01_00-00-00_000000_{1 << 22}/sockets/plasma_store"
    assert len(os.fsencode(socket)) <= 107
    assert folder.parent in map(Path, private.PLACES)
    # whose Ray already has a folder
    assert launch.run_folder(NAME, "10.0.0.1:6379") == tmp_path / ("x" * 90) / f"rlflow-{NAME}"


def test_rays_own_variable_wins_if_it_is_short_enough(tmp_path, temporary, monkeypatch):
    temporary(tmp_path)
    monkeypatch.setenv("RAY_TMPDIR", "/var/tmp")
    assert launch.run_folder(NAME, None) == Path("/var/tmp") / f"rlflow-{NAME}"


def test_without_a_safe_folder_the_run_is_refused(tmp_path, temporary, monkeypatch):
    temporary(tmp_path)
    tmp_path.chmod(0o777)
    monkeypatch.setattr(private, "PLACES", ())
    with pytest.raises(PlanError, match=r"(?s)no folder is suitable(.*)found rights 777(.*)TMPDIR"):
        launch.run_folder(NAME, "auto")


def test_ray_uses_the_loopback_address_only_while_it_starts():
    constants = sys.modules["ray._private.ray_constants"]
    before = constants.ENABLE_RAY_CLUSTER
    with launch._on_loopback():
        from ray._private.services import resolve_ip_for_localhost

        assert resolve_ip_for_localhost("127.0.0.1") == "127.0.0.1"
    assert before == constants.ENABLE_RAY_CLUSTER


def test_an_address_without_a_ray_is_refused(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(PlanError) as silent:
            launch.start(address, 1, tmp_path / "rlflow-0", seconds=0.1)
        # held by a name, as Python would lose a signal that arrives while the thread is freed
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM))
        with pytest.raises(KeyboardInterrupt), ending_at_once():  # noqa: PT012, as the signal may come at once
            timer.start()
            launch.start(address, 1, tmp_path / "rlflow-0", seconds=60.0)
    job = Job("alone", address=address)
    job.role("one", Path)
    with pytest.raises(PlanError, match=rf"cannot join a Ray at '{address}'(.|\n)*refused"), job:
        pass
    assert f"cannot join a Ray at '{address}'" in str(silent.value)
    assert "sent nothing for 0.1 s" in str(silent.value)
    assert "6379" in str(silent.value)


def test_a_server_with_the_protocol_of_ray_that_is_no_ray_is_refused(tmp_path):
    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # HTTP/2's settings, and nothing else
            connection.recv(100)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(
            PlanError, match=r"protocol of Ray answered, but Ray's controller \(GCS\) did not"
        ):
            launch.start(address, 1, tmp_path / "rlflow-0", seconds=5.0)


def test_a_started_ray_needs_the_loopback_address(tmp_path, monkeypatch):
    def down(address):
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", lambda *words, **more: down(words))
    with pytest.raises(
        PlanError, match=r"(?s)Ray did not start.*127\.0\.0\.1 cannot be reached.*Network is unreachable"
    ):
        launch.start(None, 1, tmp_path / "rlflow-0")
