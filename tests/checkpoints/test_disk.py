"""A full, limited or read-only disk: the save reports an error, earlier saves stay, and the next save is
tried."""

import json
import shutil

import pytest
import torch

from rlflow.checkpoints.folder import steps
from rlflow.checkpoints.reading import load_latest
from rlflow.checkpoints.snapshot import Snapshot
from rlflow.checkpoints.writer import Writer


def loads(campaign, run):
    loaded = load_latest(run)
    assert loaded.rejected == []
    assert campaign.same(loaded.snapshot, campaign.example(loaded.snapshot.iteration))
    return loaded.snapshot.iteration


def test_a_snapshot_larger_than_the_free_space_is_refused(disk, campaign, faults):
    run, said, calls = campaign.write_run(disk.path / "run"), [], []
    with Writer(run, on_failure=said.append) as writer:
        with faults.watching(lambda name, args: calls.append(name)):
            writer.submit(Snapshot(13, {"g": {"large": torch.zeros(2 << 20)}}))
            assert writer.wait(60)
        assert "write" not in calls
        assert "checkpoint of iteration 13 not saved: not enough disk space" in said[0]
        assert said == writer.failures
        assert loads(campaign, run) == 12
        writer.submit(campaign.example(14))
    assert len(said) == 1
    assert loads(campaign, run) == 14


@pytest.mark.slow
def test_a_disk_that_fills_at_any_call_harms_nothing(disk, campaign, faults):
    """At each call of a save, another program uses the rest of the disk."""
    outcomes, point = [], 0
    while not outcomes or outcomes[-1][0]:
        run = campaign.write_run(disk.path / str(point), (10, 11))
        seen = []

        def before(name, args, seen=seen, point=point):
            seen.append(name)
            if len(seen) == point + 1:
                disk.fill()

        with Writer(run, shard_bytes=500, on_failure=lambda message: None) as writer:
            with faults.watching(before):
                writer.submit(campaign.example(12))
                assert writer.wait(60)
            reached = len(seen) > point
            now = loads(campaign, run)
            assert now == (11 if writer.failures else 12)
            assert [path.name for path in (run / "checkpoints").iterdir() if path.name.startswith(".")] == []
            disk.empty()
            writer.submit(campaign.example(13))
        assert loads(campaign, run) == 13
        outcomes.append((reached, bool(writer.failures)))
        shutil.rmtree(run)
        point += 1
    assert len(outcomes) > 40
    assert sum(failed for _, failed in outcomes) > 10


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_harms_nothing(tmp_path, campaign, injected):
    campaign.write_run(tmp_path / "base", (10, 11))
    injected("limit", tmp_path)
    failed = {}
    for report in tmp_path.glob("*.json"):
        failed[int(report.stem)] = json.loads(report.read_text())
        assert loads(campaign, tmp_path / report.stem) == (11 if failed[int(report.stem)] else 12)
    assert "File too large" in failed[0][0]
    assert failed[5000] == []
    assert sum(map(bool, failed.values())) >= 8


def test_saving_survives_a_temporarily_read_only_disk(disk, campaign):
    run, said = campaign.write_run(disk.path / "run"), []
    with Writer(run, on_failure=said.append) as writer:
        assert disk.mount("remount,ro").returncode == 0
        writer.submit(campaign.example(13))
        assert writer.wait(60)
        assert "Read-only file system" in said[0]
        assert loads(campaign, run) == 12
        assert disk.mount("remount,rw").returncode == 0
        writer.submit(campaign.example(14))
    assert len(said) == 1
    assert loads(campaign, run) == 14


def test_a_disk_that_becomes_read_only_at_any_call_harms_nothing(disk, campaign, faults):
    for point in range(0, 40, 3):
        run, seen = campaign.write_run(disk.path / str(point), (10, 11)), []

        def before(name, args, seen=seen, point=point):
            seen.append(name)
            if len(seen) == point + 1:
                disk.mount("remount,ro")  # refused while a file is open for writing: then nothing happens

        with Writer(run, shard_bytes=500, on_failure=lambda message: None) as writer, faults.watching(before):
            writer.submit(campaign.example(12))
        assert loads(campaign, run) == (11 if writer.failures else 12)
        assert disk.mount("remount,rw").returncode == 0


def test_an_unwritable_run_folder_fails_no_training(disk, campaign):
    (disk.path / "run").mkdir()
    assert disk.mount("remount,ro").returncode == 0
    said = []
    with Writer(disk.path / "run", on_failure=said.append) as writer:
        writer.submit(campaign.example(1))
    assert "Read-only file system" in said[0]


def test_an_error_in_on_failure_does_not_end_the_writer(disk, campaign):
    def raising(message):
        raise RuntimeError("the tracker is away")

    run = campaign.write_run(disk.path / "run")
    with Writer(run, on_failure=raising) as writer:
        writer.submit(Snapshot(13, {"g": {"large": torch.zeros(2 << 20)}}))
        writer.submit(campaign.example(14))
    assert "RuntimeError: the tracker is away" in writer.failures[1]
    assert loads(campaign, run) == 14


def test_without_a_callback_a_failure_is_printed(disk, capfd):
    with Writer(disk.path) as writer:
        writer.submit(Snapshot(13, {"g": {"large": torch.zeros(2 << 20)}}))
    assert "checkpoint of iteration 13 not saved: not enough disk space" in capfd.readouterr().err
    assert steps(disk.path / "checkpoints") == []


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_no_checkpoint_is_refused(tmp_path, keep):
    with pytest.raises(ValueError, match="keep"):
        Writer(tmp_path, keep)
