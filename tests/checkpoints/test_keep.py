"""The checkpoints that are kept, and a writer that gets more snapshots than it can write."""

import os
import threading

import pytest

from rlflow.checkpoints.reading import load_latest
from rlflow.checkpoints.writer import Writer


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, campaign, keep):
    run = campaign.write_run(tmp_path, (1, 2, 3, 4, 5), keep)
    assert names(run) == ["latest", *(f"step-{iteration:08d}" for iteration in range(6 - keep, 6))]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path, campaign):
    run = campaign.write_run(tmp_path, (1, 2))
    (run / "checkpoints/step-00000002/manifest.json").write_bytes(b"")
    with Writer(run, keep=2) as writer:
        writer.submit(campaign.example(3))
    assert names(run) == ["latest", "step-00000001", "step-00000002", "step-00000003"]


def test_the_checkpoint_named_by_latest_is_kept(tmp_path, campaign):
    run = campaign.write_run(tmp_path, (5, 6))
    with Writer(run, keep=1) as writer:
        writer.submit(campaign.example(3))
    assert names(run) == ["latest", "step-00000003"]
    assert load_latest(run).snapshot.iteration == 3


def test_other_files_in_the_folder_are_left_alone(tmp_path, campaign):
    run = campaign.write_run(tmp_path, (1,))
    for name in ("notes.txt", "step-1", "step-00000001.bak", ".hidden"):
        (run / "checkpoints" / name).write_text("mine")
    with Writer(run, keep=1) as writer:
        writer.submit(campaign.example(2))
    assert names(run) == [".hidden", "latest", "notes.txt", "step-00000001.bak", "step-00000002", "step-1"]


class Gate:
    """Blocks the writing thread before its first folder is made, like a disk that does not answer."""

    def __init__(self):
        self.reached, self.open, self.made = threading.Event(), threading.Event(), []

    def before(self, name, args):
        if name == "mkdir" and ".writing" in str(args[0]):
            self.made.append(os.path.basename(args[0]))
            self.reached.set()
            assert self.open.wait(60)


def test_training_continues_while_a_disk_does_not_answer(tmp_path, campaign, faults):
    gate = Gate()
    with faults.watching(gate.before):
        writer = Writer(tmp_path, keep=3, on_failure=lambda message: None, patience=0.01)
        writer.submit(campaign.example(1))
        assert gate.reached.wait(60)
        writer.submit(campaign.example(2))
        writer.submit(campaign.example(3))
        assert writer.failures == [
            "checkpoint of iteration 2 not saved: saving the one before it took more than 0.01 s"
        ]
        gate.open.set()
        assert writer.close()
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000003"]
    assert load_latest(tmp_path).snapshot.iteration == 3


def test_closing_has_a_deadline_and_reports_lost_snapshots(tmp_path, campaign, faults):
    gate = Gate()
    with faults.watching(gate.before):
        writer = Writer(tmp_path, on_failure=lambda message: None)
        writer.submit(campaign.example(1))
        assert gate.reached.wait(60)
        assert not writer.close(seconds=0.01)
        assert writer.failures == ["the last checkpoint was not saved within 0.01 s"]
        gate.open.set()
        writer._thread.join(60)
    with pytest.raises(ValueError, match="closed"):
        writer.submit(campaign.example(2))


def test_with_enough_time_every_snapshot_is_written(tmp_path, campaign):
    with Writer(tmp_path, keep=9) as writer:
        for iteration in range(1, 8):
            writer.submit(campaign.example(iteration))
        assert writer.wait(60)
        assert writer.saved == tmp_path / "checkpoints/step-00000007"
    assert names(tmp_path) == ["latest", *(f"step-{iteration:08d}" for iteration in range(1, 8))]
