"""Ray is used with a token. Without it, runs are refused here, and by a Ray that has one."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlflow.cluster import launch, token
from rlflow.errors import PlanError

JOIN = """
import sys
from pathlib import Path
from rlflow.cluster.launch import start
start(sys.argv[1], 1, Path("rlflow-0"), insecure=True)
"""


def test_a_ray_without_a_token_must_be_requested(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(PlanError, match="RAY_AUTH_MODE=disabled") as refused:
        launch.start("127.0.0.1:1", 1, tmp_path / "rlflow-0")
    assert "--insecure" in str(refused.value)


def test_a_token_without_a_file_is_reported(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "file" / "auth_token"))
    with pytest.raises(PlanError, match=r"(?s)auth_token'.*RAY_AUTH_TOKEN_PATH"):
        token.guard()


@pytest.mark.parametrize("rights", [0o644, 0o600])
def test_the_token_is_made_private(tmp_path, monkeypatch, rights):
    path = tmp_path / "ray" / "auth_token"
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    token.guard()
    first = path.read_text()
    path.chmod(rights)
    token.guard()
    assert path.read_text() == first
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_empty_token_is_replaced(tmp_path, monkeypatch):
    """A process that is killed while it makes a token leaves an empty file."""
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    path = tmp_path / "auth_token"
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    path.touch()
    token.guard()
    assert len(path.read_text()) == 64
    assert [each.name for each in tmp_path.iterdir()] == ["auth_token"]


def test_a_blank_token_does_not_count(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in (token.TOKEN, token.PATH):
        monkeypatch.setenv(variable, " \n")
    token.guard()
    assert not {token.TOKEN, token.PATH} & os.environ.keys()
    (made := tmp_path / ".ray" / "auth_token").write_text(" \n")
    token.guard()
    assert len(made.read_text().strip()) == 64


def test_concurrent_runs_read_one_complete_token(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "auth_token"))

    def begins(number):
        token.guard()
        return (tmp_path / "auth_token").read_text()

    with ThreadPoolExecutor(8) as threads:
        (read,) = set(threads.map(begins, range(8)))
    assert len(read) == 64
    assert [each.name for each in tmp_path.iterdir()] == ["auth_token"]


def test_the_ray_of_a_run_has_its_own_token(tmp_path, monkeypatch):
    for name in (token.MODE, token.TOKEN, token.PATH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/nowhere")
    (folder := tmp_path / "rlflow-0").mkdir(mode=0o700)
    token.make_own(folder)
    assert os.environ[token.PATH] == str(folder / "token")
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    assert len((folder / "token").read_text()) == 64
    token.forget_own()
    assert token.PATH not in os.environ
    monkeypatch.setenv(token.PATH, str(tmp_path / "of-mine"))  # which names the token in use
    token.make_own(folder)
    token.forget_own()
    assert os.environ[token.PATH] == str(tmp_path / "of-mine")
    assert len((tmp_path / "of-mine").read_text()) == 64


def test_a_run_leaves_a_ray_on_public_addresses(monkeypatch):
    left = []
    monkeypatch.setattr(
        launch, "ray_nodes", lambda: [{"NodeManagerAddress": "10.0.0.1"}, {"NodeManagerAddress": "8.8.8.8"}]
    )
    monkeypatch.setattr(launch, "disconnect", lambda: left.append(True))
    with pytest.raises(PlanError, match=r"8\.8\.8\.8"):
        launch.refuse_public_nodes(False)
    assert left == [True]
    launch.refuse_public_nodes(True)


@pytest.mark.slow
def test_a_caller_without_the_token_is_refused(ray_address, tmp_path):
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "PYTHONPATH": ":".join(sys.path),
        "RAY_AUTH_MODE": "disabled",
    }
    done = subprocess.run(
        [sys.executable, "-c", JOIN, ray_address],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode != 0
    assert "Unauthenticated" in done.stderr
    assert "PlanError" in done.stderr
