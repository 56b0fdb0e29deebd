"""Real processes, real FSDP2 and tensor-parallel shards, each transport."""

import subprocess
import sys
from dataclasses import replace

import pytest

from rlflow.processes.process import Process
from rlflow.training.weight_sync.mailbox import Mailbox
from rlflow.training.weight_sync.segment import SharedFile, sweep


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_transport_moves_every_layout_exactly_and_reports_errors(on_ranks):
    import worker  # imported here because only this test needs it, and the import takes seconds

    found = on_ranks(4, lambda rank: worker.checked(rank, 4))
    assert len(found[0]) == 7 * 4 + 3 + 11
    assert [{case: problems for case, problems in one.items() if problems} for one in found] == [{}] * 4


def test_memory_of_dead_processes_is_removed_and_of_living_ones_kept(tmp_path):
    own = Process.this()
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    dead = replace(own, pid=ended.pid)
    reused = replace(own, started="1")  # an earlier process with this process's pid
    owners = {
        "run-1-a": dead,
        "run-1-b": reused,
        "run-1-c": own,
        "run-1-d": replace(dead, space="1"),
        "run-2-a": dead,
    }
    paths = {name: tmp_path / f"rlflow-{name}-{owner.tag()}" for name, owner in owners.items()}
    for path in (*paths.values(), tmp_path / "rlflow-run-1-of-nobody"):
        assert SharedFile(str(path), 64).create() == ""
    assert sorted(sweep("run-1", tmp_path)) == [paths["run-1-a"], paths["run-1-b"]]
    assert {path for path in paths.values() if path.exists()} == {
        paths["run-1-c"],
        paths["run-1-d"],
        paths["run-2-a"],
    }
    kept = paths["run-1-c"]
    assert "File exists" in SharedFile(str(kept), 64).create()


def test_the_next_sender_of_a_run_removes_the_file_of_a_dead_one(tmp_path):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom rlflow.training.weight_sync.mailbox import Mailbox\n"
        "box = Mailbox('run.1', Path(sys.argv[1]))\nbox.open(100, 0, 2)\nprint(box.place.path, "
        "flush=True)\nos._exit(3)"
    )
    left = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    assert [str(path) for path in tmp_path.iterdir()] == [left]
    box = Mailbox("run.1", tmp_path)
    box.open(100, 0, 2)
    box.outbox(1).fill_(7)
    assert [str(path) for path in tmp_path.iterdir()] == [box.place.path]
    reader = SharedFile(*box.place).opened()
    box.close()
    assert list(tmp_path.iterdir()) == []
    assert (reader[box.room :] == 7).all()
