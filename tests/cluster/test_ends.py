"""However a run on pools ends, none of its processes and files is left, and so none of its shared memory, which has no name to outlast
them."""

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

from rlflow.watchdog import kin, private

MARK = "RLFLOW_TEST_MARK"  # a variable of the environment, which all that is started inherits
STARTED_SECONDS, LEFT_SECONDS = 120.0, 100.0
COMING = re.compile(r"""pools: all=2: starting a Ray of its own
pools: Ray is there after \d+\.\d s; workers start and load: 2 on 'all' \(actor\)
(.|\n)*run: """)
REWARD = "def length(completion):\n    return float(len(completion))\n"


def folder_of(mark):
    """The private folder of a run with this mark, by the mark of what it started."""
    for pid in [text.partition(" ")[0] for text in marked(mark)]:
        with contextlib.suppress(OSError):
            found = dict(item.partition(b"=")[::2] for item in Path("/proc", pid, "environ").read_bytes().split(b"\0"))
            if kin.MARK.encode() in found:
                return Path(private.place(), f"rlflow-{found[kin.MARK.encode()].decode().partition('/')[0]}")
    return None


def twice(process):
    process.send_signal(signal.SIGINT)
    until(lambda: b"stopping" in Path(process.args[-1], "said").read_bytes() or process.poll() is not None, 60)
    process.send_signal(signal.SIGINT)


ENDS = {
    "killed early": (0, lambda process: process.kill()),
    "killed at work": (1, lambda process: process.kill()),
    "ctrl-C twice": (1, twice),
    "terminated": (1, lambda process: process.terminate()),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left(tmp_path, how):
    at_work, end = ENDS[how]
    mark, said = uuid.uuid4().hex, tmp_path / "said"
    (tmp_path / "judge.py").write_text(REWARD)
    words = [sys.executable, "-m", "rlflow.cli.main", "run", "grpo", "--backend", "null", "--pools", "all=2", "--iterations", "100000",
             "--prompts", "8", "--hp.samples", "2", "--reward", f"{tmp_path}/judge.py:length", "--held-out", "0", "--out", str(tmp_path)]
    with said.open("wb") as file:
        process = subprocess.Popen(words, stdout=file, stderr=file, env={**os.environ, MARK: mark}, start_new_session=True)
        try:
            assert until(lambda: len(marked(mark.encode())) > 2, STARTED_SECONDS), said.read_text()
            if at_work:
                assert until(lambda: list(tmp_path.glob("grpo-*/samples.jsonl")), STARTED_SECONDS), said.read_text()
            folder = until(lambda: folder_of(mark.encode()), STARTED_SECONDS)
            if at_work:
                private.check(folder)
                assert list(folder.glob("all-*/meeting"))
                assert list(folder.glob("r/session_*/sockets/raylet"))
            time.sleep(random.Random(how).random() * 2)  # a moment that nobody chose, the same each time
            if at_work:
                assert COMING.search(said.read_text()), said.read_text()
            end(process)
            assert until(lambda: process.poll() is not None, 60), "the driver goes on"
            assert until(lambda: not marked(mark.encode()), LEFT_SECONDS), (marked(mark.encode()), said.read_text())
            assert until(lambda: not folder.exists(), LEFT_SECONDS), list(folder.rglob("*"))
        finally:
            process.kill()
            process.wait()
