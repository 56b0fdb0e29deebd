"""Files that are replaced completely, folders that get their names when they are complete, and the remains of
dead processes."""

import os
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import save_file

from rlflow.checkpoints import durable


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_completely_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    durable.replace(path, b"first")
    durable.replace(path, b"sec", b"ond")
    assert (path.read_bytes(), names(tmp_path)) == (b"second", ["file"])
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        durable.replace(tmp_path / "folder", b"third")
    assert names(tmp_path) == ["file", "folder"]


def test_a_folder_replaces_another(tmp_path):
    for name in ("old", "new"):
        (tmp_path / name / "inner").mkdir(parents=True)
        (tmp_path / name / "inner" / name).write_text(name)
    (tmp_path / "new" / "link").symlink_to("nowhere")
    durable.take_place(tmp_path / "new", tmp_path / "old")
    assert names(tmp_path) == ["old"]
    assert names(tmp_path / "old" / "inner") == ["new"]


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o027, 0o077])
def test_a_replacement_has_the_rights_of_new_files(tmp_path, mask):
    before = os.umask(mask)
    try:
        assert durable.umask() == mask
        (folder := tmp_path / "new").mkdir(mode=0o700)
        (folder / "inner").mkdir()
        (folder / "inner").chmod(0o2700)  # whose files get its group
        save_file({"a": torch.zeros(1)}, folder / "inner" / "weights.safetensors")
        (folder / "script").touch(mode=0o700)
        (folder / "link").symlink_to("nowhere")
        (folder / "open").touch()
        (folder / "open").chmod(0o666)
        durable.take_place(folder, tmp_path / "there")
    finally:
        os.umask(before)
    found = {
        path.name: path.stat().st_mode & 0o7777
        for path in (tmp_path / "there").rglob("*")
        if not path.is_symlink()
    }
    new = 0o666 & ~mask
    assert found == {"inner": 0o2777 & ~mask, "weights.safetensors": new, "script": new | 0o100, "open": new}
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o777 & ~mask


LEAVES = """
import sys
from pathlib import Path
from rlflow.checkpoints import durable
durable.aside(Path(sys.argv[1]) / "file").write_text("")
durable.aside(Path(sys.argv[1]) / "folder", "removing").mkdir()
"""


def test_only_remains_of_dead_processes_are_removed(tmp_path):
    own = durable.aside(tmp_path / "own")
    own.write_text("")
    subprocess.run([sys.executable, "-c", LEAVES, str(tmp_path)], check=True)
    assert len(names(tmp_path)) == 3
    durable.clear(tmp_path, older=60.0)
    assert len(names(tmp_path)) == 3
    for path in durable.leftovers(tmp_path):
        os.utime(path, (time.time() - 61, time.time() - 61))
    durable.clear(tmp_path, older=60.0)
    assert names(tmp_path) == [own.name]
    assert durable.leftovers(tmp_path / "nowhere") == []


def test_the_longest_name_has_a_temporary_name(tmp_path):
    durable.replace(tmp_path / ("n" * 255), b"whole")
    assert names(tmp_path) == ["n" * 255]


def test_reading_ignores_pipes_and_links_and_is_limited(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert durable.read(tmp_path / "file") == b"12345"
    assert durable.read(tmp_path / "file", 3) == b"1234"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("file")
    for name in ("pipe", "link", "missing"):
        with pytest.raises(OSError, match=f"'.*{name}'"):
            durable.read(tmp_path / name)
