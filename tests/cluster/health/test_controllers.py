"""The processes of a Ray: which ones are watched, and the message when one is gone."""

import os
import shutil
import subprocess

import pytest

from rlflow.cluster.health.controllers import GCS, RAYLET, Controllers
from rlflow.processes.watchdog import process_tag


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Programs of these names as children of this process. Other tests may also run a Ray in it."""
    others, descendants = set(process_tag.descendants(os.getpid())), process_tag.descendants
    monkeypatch.setattr(
        process_tag, "descendants", lambda pid: [known for known in descendants(pid) if known not in others]
    )
    started = {}
    for name in (RAYLET, GCS, "dashboard"):
        shutil.copy2(shutil.which("sleep"), tmp_path / name)
        started[name] = subprocess.Popen([str(tmp_path / name), "600"])
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def test_only_the_raylet_and_the_controller_are_watched(processes):
    controllers = Controllers.of_this_process()
    assert {name: pid for name, (pid, _) in controllers.processes.items()} == {
        name: processes[name].pid for name in (RAYLET, GCS)
    }
    assert controllers.lost() is None


def test_the_dead_controller_is_named(processes):
    controllers = Controllers.of_this_process()
    processes[GCS].kill()
    processes[GCS].wait()
    assert controllers.lost(RAYLET) is None
    assert controllers.lost() == controllers.lost(GCS)
    assert f"gcs_server (pid {processes[GCS].pid}) has died" in controllers.lost()


def test_the_processes_of_a_joined_ray_are_not_watched():
    assert Controllers().lost() is None
    assert Controllers().lost(RAYLET) is None
