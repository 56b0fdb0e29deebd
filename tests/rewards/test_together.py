"""Rows of an async reward are awaited together; a failing row loses only its own score."""

import math
from pathlib import Path

import pytest

import rlflow
from rlflow.rewards import bind, parse_reward
from rlflow.rewards.together import SideBySide

FILE = '''
import asyncio, os, time

async def uneven(completion):
    """Rows end in the opposite order of their start; one awaits for ever, one raises, one leaves, one holds the process."""
    if completion == "ever": await asyncio.Event().wait()
    if completion == "raise": raise ValueError("no judge")
    if completion == "leave": raise SystemExit(3)
    if completion == "block": print("hangs", end=""); time.sleep(3600)
    if completion == "exit": os._exit(3)
    await asyncio.sleep(0.05 / (1 + float(completion)))
    return float(completion)
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "judge.py").write_text(FILE)
    return str(tmp_path / "judge.py")


def answers(pool, file, *texts, timeout=240.0):
    return bind([parse_reward(f"{file}:uneven")], pool, timeout=timeout)[0].score(
        rlflow.Batch.of(completion=list(texts))
    )


@pytest.mark.slow
def test_rows_of_an_async_function_keep_order_and_fail_alone(pool, file):
    texts = [str(i) for i in range(40)]
    texts[3], texts[7], texts[11] = "ever", "raise", "leave"
    scores = answers(pool, file, *texts, timeout=5.0)
    assert scores.missing == {"timeout": 1, "raised": 2}
    assert [i for i, score in enumerate(scores.values.tolist()) if math.isnan(score)] == [3, 7, 11]
    assert all(score == i for i, score in enumerate(scores.values.tolist()) if i not in (3, 7, 11))


@pytest.mark.slow
@pytest.mark.parametrize(("text", "cause"), [("block", "timeout"), ("exit", "died")])
def test_a_row_that_blocks_an_async_process_is_missing_alone(patient, file, text, cause):
    scores = answers(patient, file, "1", "2", text, "4", timeout=5.0)
    assert scores.missing == {cause: 1}
    assert scores.values[[0, 1, 3]].tolist() == [1, 2, 4]


def test_rows_are_awaited_together_in_one_loop():
    import asyncio

    loops, waiting = [], []

    async def meet(count):
        """Wait until all rows of the call are here."""
        loops.append(asyncio.get_running_loop())
        waiting.append(asyncio.Event())
        if len(waiting) == count:
            for event in waiting:
                event.set()
        await waiting[-1].wait()
        return count

    rows = SideBySide()
    for count in (3, 2):
        waiting.clear()
        assert list(rows.scores(meet, [{"count": count}] * count, 60.0)) == [count] * count
    assert len(set(loops)) == 1
    rows.close()
