"""The processes by which a Ray lives: which ones count, and what is said when one of them is gone."""

import os
import shutil
import subprocess

import pytest

from rlflow.cluster.health.controllers import GCS, RAYLET, Controllers
from rlflow.processes.watchdog import kin


@pytest.fixture
def processes(tmp_path, monkeypatch):
    """Programs of these names as children of this process, which may have a Ray of other tests as well."""
    others, descendants = set(kin.descendants(os.getpid())), kin.descendants
    monkeypatch.setattr(
        kin, "descendants", lambda pid: [known for known in descendants(pid) if known not in others]
    )
    started = {}
    for name in (RAYLET, GCS, "dashboard"):
        shutil.copy2(shutil.which("sleep"), tmp_path / name)
        started[name] = subprocess.Popen([str(tmp_path / name), "600"])
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def test_a_ray_is_its_raylet_and_its_controller_and_no_other_process(processes):
    controllers = Controllers.of_this_process()
    assert {name: pid for name, (pid, _) in controllers.processes.items()} == {
        name: processes[name].pid for name in (RAYLET, GCS)
    }
    assert controllers.lost() is None


def test_the_one_that_has_died_is_named_where_it_is_asked_for_or_all_are(processes):
    controllers = Controllers.of_this_process()
    processes[GCS].kill()
    processes[GCS].wait()
    assert controllers.lost(RAYLET) is None
    assert controllers.lost() == controllers.lost(GCS)
    assert f"gcs_server (pid {processes[GCS].pid}) has died" in controllers.lost()


def test_a_ray_that_was_joined_is_others_affair():
    assert Controllers().lost() is None
    assert Controllers().lost(RAYLET) is None
