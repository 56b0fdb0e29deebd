"""Interpreters of other systems: requirements are read statically and pinned; environments are created once."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from rlflow.benchmarks import peer
from rlflow.benchmarks.cells import PEERS
from rlflow.benchmarks.measured_process import CellFailed


def test_requirements_are_read_statically_and_pinned_to_local_versions(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("raise SystemExit\nREQUIRES = ('trl==1.16.0', 'torch', 'nowhere-on-earth')\n")
    assert peer.requirements(file) == ("trl==1.16.0", f"torch=={version('torch')}", "nowhere-on-earth")
    assert peer.requirements(PEERS / "bare.py") == ()
    assert peer.requirements(PEERS / "trl.py")[0].startswith("trl==")
    assert peer.requirements(PEERS / "verl.py")[:2] == (
        f"torch=={version('torch')}",
        f"ray=={version('ray')}",
    )
    assert peer.requirements(PEERS / "verl.py", "WITHOUT_DEPENDENCIES")[0].startswith("verl==")


def test_a_system_without_requirements_runs_in_this_interpreter(tmp_path):
    assert peer.interpreter(PEERS / "bare.py", print) == sys.executable


def test_an_environment_is_created_once_per_requirements(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = []

    def create(folder, **_):
        made.append(folder)
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to("/bin/true")

    monkeypatch.setattr(peer.venv, "create", create)
    file = tmp_path / "mine.py"
    for requirement in ("one==1", "one==1", "one==2"):
        file.write_text(f"REQUIRES = ({requirement!r},)\n")
        assert Path(peer.interpreter(file, lambda text: None)).parent.parent == made[-1]
    assert len(set(made)) == len(made) == 2


def test_packages_without_dependencies_are_installed_last(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def create(folder, **_):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
        (folder / "bin" / "python").chmod(0o755)

    monkeypatch.setattr(peer.venv, "create", create)
    file = tmp_path / "mine.py"
    file.write_text("REQUIRES = ('one==1', 'torch')\nWITHOUT_DEPENDENCIES = ('two==2',)\n")
    first = peer.interpreter(file, lambda text: None)
    calls = [line.partition("--quiet ")[2] for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == [f"one==1 torch=={version('torch')}", "--no-deps two==2"]
    file.write_text("REQUIRES = ('one==1', 'torch', 'two==2')\n")
    assert peer.interpreter(file, lambda text: None) != first


def test_a_failed_installation_is_the_cause_of_the_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def create(folder, **_):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").write_text("#!/bin/sh\necho 'no such package' >&2\nexit 1\n")
        (folder / "bin" / "python").chmod(0o755)

    monkeypatch.setattr(peer.venv, "create", create)
    file = tmp_path / "mine.py"
    file.write_text("REQUIRES = ('one==1',)\n")
    with pytest.raises(CellFailed, match="one==1 cannot be installed: no such package"):
        peer.interpreter(file, lambda text: None)
