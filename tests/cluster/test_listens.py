"""What a run on pools of one machine listens on: nothing that another machine or another user reaches."""

import contextlib
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from started import marked, until

from rlflow.watch.listening import addresses
from rlflow.watchdog import private

MARK = "RLFLOW_TEST_MARK"
SECONDS = 120.0
ABSTRACT = re.compile(r"@rlflow-[0-9a-f]{32}")  # named by 128 bits that the run draws, and gone once its lines are connected
REWARD = "def length(completion):\n    return float(len(completion))\n"


def unix_sockets():
    """Inode → name of each Unix socket that listens and has one."""
    lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {line[6]: line[7] for line in lines if len(line) > 7 and int(line[3], 16) & 0x10000}


def socket_inodes(pid):
    """Inodes of the sockets that a process has open."""
    with contextlib.suppress(OSError):  # it ended meanwhile
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    return set()


def below_a_private_folder(name):
    return any(folder.stat().st_mode & 0o077 == 0 and folder.stat().st_uid == os.geteuid() for folder in Path(name).parents)


@pytest.mark.slow
def test_a_run_on_pools_of_one_machine_is_reached_from_this_machine_alone_and_its_sockets_by_this_user(tmp_path):
    mark, said = uuid.uuid4().hex, tmp_path / "said"
    (tmp_path / "judge.py").write_text(REWARD)
    words = [sys.executable, "-m", "rlflow.cli.main", "run", "grpo", "--backend", "null", "--pools", "train=2,rollout=1", "--iterations",
             "100000", "--prompts", "8", "--hp.samples", "2", "--reward", f"{tmp_path}/judge.py:length", "--held-out", "0", "--out",
             str(tmp_path)]
    with said.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, MARK: mark}, start_new_session=True)
    try:
        assert until(lambda: list(tmp_path.glob("grpo-*/samples.jsonl")) or process.poll() is not None, SECONDS)
        assert process.poll() is None, said.read_text()
        pids = [int(line.partition(" ")[0]) for line in marked(mark.encode())]
        over_ip = [address for pid in pids for address in addresses(pid)]
        assert [f"{host}:{port}" for host, port in over_ip if not host.is_loopback] == []
        assert over_ip  # so that something was looked at
        ours = {inode for pid in pids for inode in socket_inodes(pid)}
        named = [name for inode, name in unix_sockets().items() if inode in ours]
        assert [name for name in named if not ABSTRACT.fullmatch(name) and not below_a_private_folder(name)] == []
        assert any(name.endswith("/plasma_store") for name in named)
        (folder,) = {parent for name in named for parent in Path(name).parents if parent.name.startswith(private.PREFIX)}
        private.check(folder)
    finally:
        process.terminate()
        process.wait(60)
    assert until(lambda: not folder.exists(), SECONDS)
