"""No end of a run on pools leaves processes, files or shared memory, which has no name to outlast them. A run
on one machine listens on nothing that another machine or another user can reach."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from started import marked, until

from rlflow.monitoring.doctor import addresses
from rlflow.processes.watchdog import private, process_tag

MARK = "RLFLOW_TEST_MARK"  # an environment variable that all started processes inherit
STARTED_SECONDS, LEFT_SECONDS = 120.0, 100.0
POOLS = "train=2,rollout=1"
COMING = re.compile(r"""pools: train=2,rollout=1: starting a Ray for this run
pools: Ray is ready after \d+\.\d s; workers start and load: 2 on 'train' \(actor\), 1 on 'rollout' \(actor\)
(.|\n)*run: """)
REWARD = "def length(completion):\n    return float(len(completion))\n"


def folder_of(mark):
    """Return the private folder of a run by the mark of its processes."""
    for pid in [text.partition(" ")[0] for text in marked(mark)]:
        with contextlib.suppress(OSError):
            found = dict(
                item.partition(b"=")[::2] for item in Path("/proc", pid, "environ").read_bytes().split(b"\0")
            )
            if process_tag.MARK.encode() in found:
                return Path(
                    private.place(), f"rlflow-{found[process_tag.MARK.encode()].decode().partition('/')[0]}"
                )
    return None


# named by 128 random bits of the run: lines of calls, which vanish when connected, and a fork server, which
# requires a key
ABSTRACT = re.compile(r"@rlflow-(forks-)?[0-9a-f]{32}")


def unix_sockets():
    """Return inode → name of each listening Unix socket that has a name."""
    lines = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return {line[6]: line[7] for line in lines if len(line) > 7 and int(line[3], 16) & 0x10000}


def socket_inodes(pid):
    """Return the inodes of a process's open sockets."""
    with contextlib.suppress(OSError):  # it ended meanwhile
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}
    return set()


def below_a_private_folder(name):
    return any(
        folder.stat().st_mode & 0o077 == 0 and folder.stat().st_uid == os.geteuid()
        for folder in Path(name).parents
    )


def assert_reached_from_here_alone(mark, folder):
    """Check that only this machine and this user can reach the listening sockets of processes with this mark
    and private folder."""
    pids = [int(line.partition(" ")[0]) for line in marked(mark)]
    over_ip = [address for pid in pids for address in addresses(pid)]
    assert [f"{host}:{port}" for host, port in over_ip if not host.is_loopback] == []
    assert over_ip  # so that the check covers something
    ours = {inode for pid in pids for inode in socket_inodes(pid)}
    named = [name for inode, name in unix_sockets().items() if inode in ours]
    assert [name for name in named if not ABSTRACT.fullmatch(name) and not below_a_private_folder(name)] == []
    assert any(name.endswith("/plasma_store") for name in named)
    assert {
        parent for name in named for parent in Path(name).parents if parent.name.startswith(private.PREFIX)
    } == {folder}


def twice(process):
    process.send_signal(signal.SIGINT)
    until(
        lambda: b"stopping" in Path(process.args[-1], "said").read_bytes() or process.poll() is not None, 240
    )
    process.send_signal(signal.SIGINT)


ENDS = {
    "killed early": (0, lambda process: process.kill()),
    "killed at work": (1, lambda process: process.kill()),
    "ctrl-C twice": (1, twice),
    "terminated": (1, lambda process: process.terminate()),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_run_leaves_nothing_and_is_private(tmp_path, how):
    at_work, end = ENDS[how]
    mark, said = uuid.uuid4().hex, tmp_path / "said"
    (tmp_path / "judge.py").write_text(REWARD)
    words = [
        sys.executable,
        "-m",
        "rlflow.cli.main",
        "run",
        "grpo",
        "--backend",
        "null",
        "--pools",
        POOLS,
        "--iterations",
        "100000",
        "--prompts",
        "8",
        "--hp.samples",
        "2",
        "--reward",
        f"{tmp_path}/judge.py:length",
        "--held-out",
        "0",
        "--out",
        str(tmp_path),
    ]
    with said.open("wb") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=file, env={**os.environ, MARK: mark}, start_new_session=True
        )
        try:
            assert until(lambda: len(marked(mark.encode())) > 2, STARTED_SECONDS), said.read_text()
            if at_work:
                assert until(lambda: list(tmp_path.glob("grpo-*/samples.jsonl")), STARTED_SECONDS), (
                    said.read_text()
                )
            folder = until(lambda: folder_of(mark.encode()), STARTED_SECONDS)
            if at_work:
                private.check(folder)
                assert list(folder.glob("train-*/meeting"))
                assert list(folder.glob("r/session_*/sockets/raylet"))
                assert_reached_from_here_alone(mark.encode(), folder)
            time.sleep(random.Random(how).random() * 2)  # an arbitrary moment, the same each time
            if at_work:
                assert COMING.search(said.read_text()), said.read_text()
                # Ray started no processes besides the ranks
                assert len(list(folder.glob("r/session_latest/logs/worker-*.out"))) == 3
                # each next to a fork
                assert len([line for line in marked(mark.encode()) if "forking/client.py" in line]) == 3
            end(process)
            assert until(lambda: process.poll() is not None, 240), "the driver goes on"
            assert until(lambda: not marked(mark.encode()), LEFT_SECONDS), (
                marked(mark.encode()),
                said.read_text(),
            )
            assert until(lambda: not folder.exists(), LEFT_SECONDS), list(folder.rglob("*"))
        finally:
            process.kill()
            process.wait()
