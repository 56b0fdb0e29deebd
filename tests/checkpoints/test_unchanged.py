"""Files that did not change are hard linked, and damage to one of them never reaches two neighbouring
checkpoints."""

import errno
import os

import pytest

from rlflow.checkpoints.reading import load_latest, verify
from rlflow.checkpoints.snapshot import Snapshot
from rlflow.checkpoints.writer import Writer

ROWS = bytes(range(256)) * 64


def written(run, contents, **settings):
    """Write one checkpoint for each dict of files, numbered from 1."""
    with Writer(run, **settings) as writer:
        for iteration, files in enumerate(contents, 1):
            writer.submit(Snapshot(iteration, files=files))
            assert writer.wait(60)
    assert writer.failures == []


def step(run, iteration, name="memory/rows"):
    return run / f"checkpoints/step-{iteration:08d}" / name


def inodes(run, iterations):
    return [step(run, iteration).stat().st_ino for iteration in iterations]


def test_an_unchanged_file_is_linked_to_the_last_checkpoint_but_one(tmp_path):
    written(tmp_path, [{"memory/rows": ROWS, "memory/count": b"%d" % i} for i in range(6)], keep=6)
    found = inodes(tmp_path, range(1, 7))
    assert found == [*found[:2], *found[:2], *found[:2]]
    assert found[0] != found[1]
    assert step(tmp_path, 1).stat().st_nlink == 3
    assert {step(tmp_path, i, "memory/count").stat().st_nlink for i in range(1, 7)} == {1}
    loaded = load_latest(tmp_path).snapshot
    assert loaded.files == {"memory/rows": ROWS, "memory/count": b"5"}


def test_with_one_checkpoint_kept_each_file_exists_once(tmp_path):
    written(tmp_path, [{"memory/rows": ROWS}], keep=1)
    first = inodes(tmp_path, [1])
    with Writer(tmp_path, keep=1) as writer:
        for iteration in (2, 3):
            writer.submit(Snapshot(iteration, files={"memory/rows": ROWS}))
            assert writer.wait(60)
    [last] = (tmp_path / "checkpoints").glob("step-*")
    assert last.name == "step-00000003"
    assert step(tmp_path, 3).stat().st_nlink == 1
    assert inodes(tmp_path, [3]) != first  # a new writer does not trust what an earlier one has left


@pytest.mark.parametrize("damage", ["cut", "flipped"])
@pytest.mark.parametrize("keep", [2, 3])
def test_after_damage_to_a_linked_file_the_older_checkpoint_is_loaded(tmp_path, damage, keep):
    written(tmp_path, [{"memory/rows": ROWS}] * 5, keep=keep)
    path = step(tmp_path, 5)
    if damage == "cut":
        os.truncate(path, len(ROWS) - 1)
    else:
        with open(path, "r+b") as file:
            file.seek(1000)
            file.write(bytes([ROWS[1000] ^ 1]))
    loaded = load_latest(tmp_path)
    assert (loaded.snapshot.iteration, loaded.snapshot.files) == (4, {"memory/rows": ROWS})
    [(rejected, reason)] = loaded.rejected
    assert rejected.name == "step-00000005"
    assert reason.startswith("memory/rows: ")


def test_a_file_damaged_on_disk_is_written_again(tmp_path):
    with Writer(tmp_path, keep=4) as writer:
        for iteration in (1, 2, 3):
            if iteration == 3:
                with open(step(tmp_path, 1), "r+b") as file:
                    file.write(b"\1")
            writer.submit(Snapshot(iteration, files={"memory/rows": ROWS}))
            assert writer.wait(60)
    assert len(set(inodes(tmp_path, (1, 2, 3)))) == 3
    assert verify(step(tmp_path, 1).parents[1]) != []
    assert verify(step(tmp_path, 3).parents[1]) == []


def test_where_links_are_impossible_files_are_written(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    written(tmp_path, [{"memory/rows": ROWS}] * 4, keep=4)
    assert len(set(inodes(tmp_path, range(1, 5)))) == 4
    assert load_latest(tmp_path).snapshot.files == {"memory/rows": ROWS}


def test_a_changed_file_of_the_same_length_is_written(tmp_path):
    other = ROWS[:-1] + b"\0"
    written(tmp_path, [{"memory/rows": rows} for rows in (ROWS, ROWS, other)], keep=3)
    assert load_latest(tmp_path).snapshot.files == {"memory/rows": other}
    assert step(tmp_path, 1).read_bytes() == ROWS
