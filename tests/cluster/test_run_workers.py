"""The end of a run removes its workers' meeting folders and releases every waiting thread."""

from pathlib import Path

import pytest

from rlflow.cluster.health.controllers import RAYLET, Controllers
from rlflow.cluster.lean import WorkerStart
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.thread_pool import ThreadTransport
from rlflow.cluster.run_workers import RunWorkers


class Lines:
    """Lines to workers that record if they were closed."""

    closed = False

    def close(self):
        self.closed = True


@pytest.fixture
def run_workers(tmp_path):
    """The workers of a run with two pools without ranks, one on this machine and one on several."""
    (tmp_path / "train-1").mkdir(mode=0o700)
    (tmp_path / "train-1" / "meeting").touch()
    (tmp_path / "other").mkdir(mode=0o700)
    rendezvous_points = {"train": f"{tmp_path}/train-1/meeting", "rollout": "rollout-2/meeting"}
    run_workers = RunWorkers(tmp_path, {}, {}, rendezvous_points, WorkerStart(1), 3.0, 1.0, {})
    run_workers.pools |= {name: Pool(name, (), ThreadTransport()) for name in rendezvous_points}
    for pool in run_workers.pools.values():
        pool.sockets = Lines()
    return run_workers


@pytest.mark.parametrize(
    "controllers",
    [Controllers(), Controllers({RAYLET: (2**22 + 1, "0")})],
    ids=["a Ray", "a Ray that has died"],
)
def test_the_end_closes_lines_and_removes_meeting_folders(run_workers, tmp_path, controllers):
    run_workers.controllers = controllers
    run_workers.stop()
    assert [pool.sockets.closed for pool in run_workers.pools.values()] == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    run_workers.stop()  # a second call is not an error


def test_folders_are_removed_even_if_ending_the_workers_fails(run_workers, tmp_path):
    def fail():
        raise OSError("no more sockets")

    run_workers.pools["train"].sockets.close = fail
    with pytest.raises(OSError, match="no more sockets"):
        run_workers.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_waiting_threads_give_up_when_the_watch_ends(run_workers):
    assert run_workers.watch.verdict is None
    run_workers.unwatch()
    assert run_workers.watch.verdict == "the run has ended"
    assert run_workers.watch.found(60.0) is None


def test_the_watch_ends_workers_silent_for_the_heartbeat_time(run_workers):
    assert (run_workers.watch.limit, run_workers.watch.controllers) == (3.0, run_workers.controllers)
    assert Path(run_workers.rendezvous_points["train"]).exists()
