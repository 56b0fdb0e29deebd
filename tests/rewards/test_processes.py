"""A row that hangs, crashes or returns a wrong value loses only its own score, with a cause; every other row
has its score."""

import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from processes import until

from rlflow import Batch, PlanError, text, token
from rlflow.rewards import RewardPool, Scores, bind, parse_reward, score_all
from rlflow.rewards.confinement import Confinement
from rlflow.rewards.reward_pool import computed

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not


def scores_of(
    pool: RewardPool, file: str, *completions: str, timeout: float = 60.0, function: str = "chosen"
) -> Scores:
    (reward,) = bind([parse_reward(f"{file}:{function}")], pool, timeout=timeout)
    return reward.score(Batch.of(completion=list(completions)))


def alive(process: int) -> bool:
    """Return True if a process runs; an ended process that was not reaped does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def has_ended(process: int) -> bool:
    """Wait until a process that was killed has ended."""
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    ended = bool(select.select([handle], [], [], 10)[0])
    os.close(handle)
    return ended


@pytest.mark.parametrize(
    ("action", "cause", "says"),
    [
        ("exit", "died", "exited with code 3"),
        ("exit without an error", "died", "exited with code 0"),
        ("exit loudly", "died", "it last printed: the last words"),
        ("kill", "died", "killed by SIGKILL"),
        ("segfault", "died", "killed by SIG"),
        ("close", "died", "the process"),
        ("raise", "raised", "ValueError: bad row"),
        ("sys.exit", "raised", "SystemExit"),
        ("interrupt", "raised", "KeyboardInterrupt"),
        ("recurse", "raised", "RecursionError"),
        ("unprintable", "raised", "Odd"),
        ("odd", "raised", "no item"),
        ("nan", "nan", "nan"),
        ("inf", "nan", "-inf"),
        ("huge", "overflow", "too large for float32"),
        ("text", "type", "returned str"),
        ("100 MB", "type", "returned str"),
        ("list", "type", "returned list"),
        ("complex", "type", "returned complex"),
        ("none", "none", "returned None"),
    ],
)
def test_a_row_without_a_number_is_missing_and_never_0(pool, hostile, action, cause, says):
    scores = scores_of(pool, hostile, "1", action, "2", "3")
    assert math.isnan(scores.values[1])
    assert scores.values[[0, 2, 3]].tolist() == [1, 2, 3]
    assert scores.missing == {cause: 1}
    assert says in str(scores.first[cause])
    assert len(str(scores.first[cause])) < 5000


@pytest.mark.parametrize("action", ["hang", "hold", "stop"])
def test_a_hanging_row_is_killed_at_its_deadline(patient, hostile, action):
    scores = scores_of(patient, hostile, "1", action, "2", timeout=0.5)
    assert scores.values[[0, 2]].tolist() == [1, 2]
    assert scores.missing == {"timeout": 1}
    assert "0.5 s" in scores.first["timeout"]


@pytest.mark.parametrize(
    ("action", "score"),
    [("true", 1), ("int", 2), ("numpy", 0.5), ("print", 1), ("stdin", 0), ("close stdout", 1)],
)
def test_numbers_of_every_kind_count(pool, hostile, action, score, capfd):
    scores = scores_of(pool, hostile, action, "7")
    assert (scores.values.tolist(), scores.missing) == ([score, 7], {})
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_many_rows_keep_their_order_among_failing_rows(hostile):
    actions = {7: "exit", 40: "raise", 41: "kill", 100: "hang", 101: "nan", 299: "exit"}
    with RewardPool(2) as pool:
        scores = scores_of(pool, hostile, *(actions.get(n, str(n)) for n in range(300)), timeout=5)
        assert [n for n in range(300) if scores.values[n].isnan()] == sorted(actions)
        assert all(scores.values[n] == n for n in range(300) if n not in actions)
        assert scores.missing == {"died": 3, "raised": 1, "timeout": 1, "nan": 1}


def test_a_killed_worker_is_replaced_and_an_idle_one_that_dies_costs_no_row(hostile):
    with RewardPool(1) as pool:
        scores_of(pool, hostile, "1")
        (first,) = pool.pids()
        scores_of(pool, hostile, "exit")
        assert has_ended(first)
        scores_of(pool, hostile, "1")
        (second,) = pool.pids()
        assert second != first
        os.kill(second, signal.SIGKILL)
        assert has_ended(second)
        assert scores_of(pool, hostile, "1", "2").values.tolist() == [1, 2]


def test_warm_workers_are_kept(hostile):
    with RewardPool(1) as pool:
        assert pool.pids() == []
        scores_of(pool, hostile, "1")
        before = pool.pids()
        scores_of(pool, hostile, "2", function="length")
        assert pool.pids() == before


@pytest.mark.slow
def test_a_second_process_starts_only_when_rows_wait(hostile):
    with RewardPool(2, Confinement(folders=(str(Path(hostile).parent),))) as pool:
        assert scores_of(pool, hostile, *map(str, range(64))).values.tolist() == list(range(64))
        (first,) = pool.pids()
        # no row ends before both have begun
        assert scores_of(pool, hostile, "meet", "meet").values.tolist() == [1, 1]
        assert len(pool.pids()) == 2
        assert first in pool.pids()


def test_closing_leaves_no_process_behind_not_even_of_user_code(hostile):
    pool = RewardPool(2)
    child = int(scores_of(pool, hostile, "child").values[0])
    workers = pool.pids()
    assert alive(child)
    pool.close()
    assert all(has_ended(process) for process in [child, *workers])
    with pytest.raises(RuntimeError, match="closed"):
        scores_of(pool, hostile, "1")
    pool.close()


def test_a_killed_row_kills_its_children(patient, hostile):
    scores = scores_of(patient, hostile, "child", "hang", timeout=0.5)
    assert scores.missing == {"timeout": 1}
    assert has_ended(int(scores.values[0]))


def test_closing_ends_running_scoring(hostile):
    pool, raised = RewardPool(1), []

    def score():
        try:
            scores_of(pool, hostile, "hang", "1")
        except RuntimeError as error:
            raised.append(str(error))

    scores_of(pool, hostile, "1")
    thread = threading.Thread(target=score)
    thread.start()
    pool.close()
    thread.join(10)
    assert raised == ["the reward pool is closed"]


@pytest.mark.parametrize("ending", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "sys.exit(0)"])
def test_workers_end_with_their_parent(hostile, ending):
    code = (
        "import os, signal, sys\nfrom rlflow.rewards import *\npool = RewardPool(2)\n"
        f"reward, = bind([parse_reward({hostile + ':chosen'!r})], pool)\n"
        "pool.score(reward.scorer, ['completion'], [['1']] * 64)\nprint(*pool.pids(), flush=True)\n"
        "pool.submit(reward.scorer, ['completion'], [['hold'], ['hang']])\n" + ending
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    processes = [int(process) for process in ended.stdout.split()]
    assert processes
    assert all(has_ended(process) for process in processes)
    assert ended.stderr == ""


def test_several_threads_share_a_pool(pool, hostile):
    def score(n):
        return scores_of(pool, hostile, *(str(n * 100 + k) for k in range(50))).values.tolist()

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(score, range(4))) == [[n * 100 + k for k in range(50)] for n in range(4)]


def test_an_empty_batch_has_no_scores(pool, hostile):
    assert scores_of(pool, hostile).values.shape == (0,)


def test_a_file_finds_its_neighbours(pool, hostile):
    assert scores_of(pool, hostile, "x", function="imports").values.tolist() == [4.0]


def test_text_of_every_kind_arrives_unchanged(pool, hostile):
    (reward,) = bind([parse_reward(f"{hostile}:good")], pool)
    texts = ["", "\x00", "é\u2028\U0001f600", "\ud800", "a" * 1_000_000]
    assert reward.score(Batch.of(completion=texts, answer=texts)).values.tolist() == [1] * 5


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "import nothing_such\ndef f(completion): return 1",
            r"r.py:1: the reward 'f' cannot be loaded: (.|\n)*ModuleNotFoundError",
        ),
        ("x = 1\nraise SystemExit(3)\ndef f(completion): return 1", r"r.py:2: (.|\n)*SystemExit: 3"),
        (
            "import os\nos._exit(9)\ndef f(completion): return 1",
            r"failed to start 3 times in a row: the process exited with code 9",
        ),
        ("def f(completion): return 1\ndel f", "cannot be loaded"),
    ],
)
def test_a_file_that_does_not_load_is_the_users_error(pool, tmp_path, source, says):
    (tmp_path / "r.py").write_text(source)
    with pytest.raises(PlanError, match=says) as caught:
        scores_of(pool, str(tmp_path / "r.py"), "1", function="f")
    tracebacks = [note for note in getattr(caught.value, "__notes__", ()) if "Traceback" in note]
    assert len(tracebacks) == ("cannot be loaded" in str(caught.value))


def test_an_edit_during_the_run_changes_nothing(tmp_path):
    (tmp_path / "r.py").write_text("import os\ndef f(completion): return 1 if completion else os._exit(1)")
    with RewardPool(1) as pool:
        (reward,) = bind([parse_reward(f"{tmp_path / 'r.py'}:f")], pool)
        (tmp_path / "r.py").write_text("def f(completion): return 2")
        assert reward.score(Batch.of(completion=["a", "", "b"])).values[[0, 2]].tolist() == [1, 1]


def test_several_rewards_add_up_and_are_missing_together(pool, hostile):
    specs = [parse_reward(f"{hostile}:{named}") for named in ("chosen:0.5", "length:-2", "chosen")]
    scores = score_all(
        bind(specs, pool), Batch.of(completion=["4", "none", "10"], bonus=[0.0, 0.0, 1.0]), torch.float32
    )
    assert scores.values.isnan().tolist() == [False, True, False]
    assert scores.values[[0, 2]].tolist() == [0.5 * 4 - 2 * 1 + 4, 0.5 * 10 - 2 * 3 + 10]
    assert {name: part.missing for name, part in scores.parts.items()} == {
        "chosen": {"none": 1},
        "length": {},
        "chosen_2": {"none": 1},
    }
    assert scores.parts["length"].values.tolist() == [1, 4, 3]


def test_a_function_reads_only_present_row_columns(pool, hostile):
    (reward,) = bind([parse_reward(f"{hostile}:good")], pool)
    with pytest.raises(
        PlanError, match=r"reads 'answer', which the rows do not have(.|\n)*nearest: +answers"
    ):
        reward.score(Batch.of(completion=["a"], answers=["b"]))
    with pytest.raises(PlanError, match="reads 'answer', which is not a row column"):
        reward.check({"completion": text, "answer": token("int64")})


def test_numbers_reach_a_function_as_numbers(pool, tmp_path):
    (tmp_path / "r.py").write_text(
        "def f(level, share, flag): return level * 100 + share * 10 + (flag is True)"
    )
    (reward,) = bind([parse_reward(f"{tmp_path / 'r.py'}:f")], pool)
    assert reward.score(Batch.of(level=[3], share=[0.5], flag=[True])).values.tolist() == [306]


def test_waiting_for_a_core_counts_as_computing():
    busy = [
        sys.executable,
        "-I",
        "-S",
        "-c",
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass",
    ]
    asleep = ["sleep", "60"]
    with ExitStack() as stack:
        crowds = [
            [stack.enter_context(subprocess.Popen(words)) for _ in range(count)]
            for words, count in ((busy, 4), (asleep, 2))
        ]
        try:
            pids = [[process.pid for process in crowd] for crowd in crowds]
            until(lambda: computed(pids[0]) > 0.4)
            before, began = [computed(crowd) for crowd in pids], time.monotonic()
            until(lambda: time.monotonic() > began + 0.4)
            passed = time.monotonic() - began
            shares = [
                (computed(crowd) - then) / passed / len(crowd)
                for crowd, then in zip(pids, before, strict=True)
            ]
        finally:
            for process in [*crowds[0], *crowds[1]]:
                process.kill()
    assert shares[0] > 0.6
    assert shares[1] < 0.25
