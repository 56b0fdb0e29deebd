"""Rewards that fork or start long-lived processes: every row has its own score, and no process is left."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlflow import Batch
from rlflow.processes.watchdog import process_tag
from rlflow.rewards import RewardPool, bind, frames, parse_reward
from rlflow.rewards.worker_pool import Died, WorkerProcess

FORKING = '''
import os, subprocess, sys, threading, time

def number(text):
    return float(text.split()[0])

def judge(completion):
    """What a completion does before it is scored as the number that it begins with."""
    for word in completion.split()[1:]:
        ACTIONS[word]()
    return number(completion)

def child(action):
    def forking():
        if os.fork() == 0:
            action()
    return forking

def daemon():
    subprocess.Popen(["sleep", "600"], start_new_session=True)

def hidden():
    """No environment tells whose it is, but that its parent does."""
    subprocess.Popen(["sleep", "600"], start_new_session=True, env={})

ACTIONS = {
    "returns": child(lambda: None), "exits": child(lambda: sys.exit(0)), "raises": child(lambda: 1 / 0),
    "late": child(lambda: time.sleep(0.2)), "stays": child(lambda: time.sleep(600)),
    "daemon": daemon, "hidden": hidden, "hangs": lambda: threading.Event().wait(),
}
'''


@pytest.fixture(scope="module")
def forking(tmp_path_factory):
    path = tmp_path_factory.mktemp("forking") / "forking.py"
    path.write_text(FORKING)
    return path


@pytest.fixture(scope="module")
def pool():
    with RewardPool(1) as pool:
        yield pool


def scores(pool, file, completions, timeout=240.0):
    (reward,) = bind([parse_reward(f"{file}:judge")], pool, timeout=timeout)
    return reward.score(Batch.of(completion=completions))


@pytest.mark.parametrize("how", ["returns", "exits", "raises", "late"])
def test_rows_of_a_forking_reward_have_their_own_scores(pool, forking, how):
    """Forks happen in the first, a middle and the last row, and in the first row of a second message."""
    rows = [f"{n} {how}" if n in (0, 17, 31, 32, 63) else f"{n} " for n in range(64)]
    found = scores(pool, forking, rows)
    assert (found.values.tolist(), found.missing) == (list(range(64)), {})


def has_ended(pid):
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 60)[0])
    finally:
        os.close(handle)


def started_by(pool):
    (worker,) = pool.pids()
    return [pid for pid, _ in process_tag.descendants(worker)]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["daemon", "hidden", "stays"])
def test_killing_a_row_also_kills_processes_outside_its_group(forking, how):
    with RewardPool(1) as pool:
        assert scores(pool, forking, [f"1 {how}"]).values.tolist() == [1]
        (left,) = started_by(pool)
        assert scores(pool, forking, ["2 hangs"], timeout=0.2).missing == {"timeout": 1}
        assert has_ended(left)
        assert scores(pool, forking, [f"3 {how}"]).values.tolist() == [3]
        (left,) = started_by(pool)
    assert has_ended(left)


OWNER = """
import os, sys
from rlflow.rewards import RewardPool, bind, parse_reward
from rlflow.processes.watchdog.beside import Watchdog

dog = Watchdog.start()
with dog.marking():
    pool = RewardPool(1)
    reward, = bind([parse_reward(sys.argv[1] + ":judge")], pool)
    pool.score(reward.scorer, ["completion"], [["1 daemon"], ["2 stays"]])
    from rlflow.processes.watchdog import process_tag
    print(*pool.pids(), *(pid for pid, _ in process_tag.descendants(pool.pids()[0])), flush=True)
    {ending}
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), 9)", "os._exit(0)", "sys.exit(0)"])
def test_processes_of_rewards_end_with_the_owner_of_their_run(forking, ending):
    words = [sys.executable, "-c", OWNER.replace("{ending}", ending), str(forking)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    pids = list(map(int, done.stdout.split()))
    assert len(pids) == 3
    assert all(map(has_ended, pids))


@pytest.mark.parametrize(
    "reply",
    [
        lambda number: frames.reply(number, 1, 5.0),  # of another row
        lambda number: frames.reply(number - 1, 0, 5.0),  # of an earlier request
        lambda number: 5.0,
        lambda number: [number, 0],
        lambda number: [number, 0, 5.0, 6.0],
        lambda number: None,
    ],
)
def test_a_reply_without_its_row_is_ignored(reply):
    process = WorkerProcess()
    try:
        os.kill(process.child.pid, signal.SIGSTOP)
        process.send({"key": "", "names": (), "rows": [[]]}, 5.0)
        process._reader.feed(frames.packed(reply(process._number)))
        with pytest.raises(Died, match="reply"):
            process.receive(5.0, 0)
        process._reader.feed(frames.packed(frames.reply(process._number, 0, 5.0)))
        assert process.receive(5.0, 0) == 5.0
    finally:
        process.kill()


def test_output_before_a_reply_arrives_with_it():
    """Output that comes between the last read and the reply arrives too; there may be no later read."""
    heard = []
    process = WorkerProcess(on_output=heard.append)
    try:
        os.kill(process.child.pid, signal.SIGSTOP)
        process.send({"key": "", "names": (), "rows": [[]]}, 5.0)
        printed, prints = os.pipe()
        os.dup2(printed, process._output)
        os.set_blocking(process._output, False)
        os.write(prints, b"judging\n")
        process._reader.feed(frames.packed(frames.reply(process._number, 0, 5.0)))
        assert process.receive(5.0, 0) == 5.0
        assert heard == [b"judging\n"]
    finally:
        process.kill()
        for descriptor in (printed, prints):
            os.close(descriptor)


def test_each_of_two_pools_ends_its_own_processes(forking, tmp_path):
    with RewardPool(1) as other:
        scores(other, forking, ["1 daemon"])
        (stays,) = started_by(other)
        with RewardPool(1) as pool:
            scores(pool, forking, ["1 daemon"])
            (goes,) = started_by(pool)
        assert has_ended(goes)
        assert Path(f"/proc/{stays}").exists()
