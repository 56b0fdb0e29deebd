"""The end of a run removes its workers' meeting folders and releases every waiting thread."""

from pathlib import Path

import pytest

from rlflow.cluster.fleet import Fleet
from rlflow.cluster.health.controllers import RAYLET, Controllers
from rlflow.cluster.lean import WorkerStart
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.thread_pool import ThreadTransport


class Lines:
    """Lines to workers that record if they were closed."""

    closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def fleet(tmp_path):
    """The workers of a run with two pools without ranks, one on this machine and one on several."""
    (tmp_path / "train-1").mkdir(mode=0o700)
    (tmp_path / "train-1" / "meeting").touch()
    (tmp_path / "other").mkdir(mode=0o700)
    rendezvous_points = {"train": f"{tmp_path}/train-1/meeting", "rollout": "rollout-2/meeting"}
    fleet = Fleet(tmp_path, {}, {}, rendezvous_points, WorkerStart(1), 3.0, 1.0, {})
    fleet.pools |= {name: Pool(name, (), ThreadTransport()) for name in rendezvous_points}
    for pool in fleet.pools.values():
        pool.sockets = Lines()
    return fleet


@pytest.mark.parametrize(
    "controllers",
    [Controllers(), Controllers({RAYLET: (2**22 + 1, "0")})],
    ids=["a Ray", "a Ray that has died"],
)
def test_the_end_closes_lines_and_removes_meeting_folders(fleet, tmp_path, controllers):
    fleet.controllers = controllers
    fleet.stop()
    assert [pool.sockets.closed for pool in fleet.pools.values()] == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    fleet.stop()  # a second call is not an error


def test_folders_are_removed_even_if_ending_the_workers_fails(fleet, tmp_path):
    def fail():
        raise OSError("no more sockets")

    fleet.pools["train"].sockets.close = fail
    with pytest.raises(OSError, match="no more sockets"):
        fleet.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_waiting_threads_give_up_when_the_watch_ends(fleet):
    assert fleet.watch.verdict is None
    fleet.unwatch()
    assert fleet.watch.verdict == "the run has ended"
    assert fleet.watch.found(60.0) is None


def test_the_watch_ends_workers_silent_for_the_heartbeat_time(fleet):
    assert (fleet.watch.limit, fleet.watch.controllers) == (3.0, fleet.controllers)
    assert Path(fleet.rendezvous_points["train"]).exists()
