"""Score hostile completions, which are programs, with every reasoning-gym task, math-verify and user rewards.

The outcomes go into the table of ``chaos.py``. Injected: a hostile completion was scored. Detected: it got no
score. Survived: the other rows got the same scores as before. Wrong: it acted outside its process, got a
score, or changed the score of another row.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import payloads  # of tests/rewards
from chaos_folders import Outcome, Place
from reasoning_gym.factory import DATASETS

from rlflow.rewards import RewardPool, plain

SECONDS = 2.0  # time limit for a row
DEAR = ("simple_integration", "intermediate_integration")  # slow tasks: scoring takes 0.1 s for a row


def everywhere(place: Place) -> Iterator[Outcome]:
    os.environ[payloads.KEY] = "canary"
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    marks = payloads.Marks(place.folder)
    tasks = [
        *plain.EVALUATING,
        *place.of(sorted(set(DATASETS) - set(plain.EVALUATING) - {plain.COMPOSITE}), few=4),
    ]
    rows = [(payloads.task_row(task), task in DEAR) for task in tasks]
    with RewardPool(1) as pool:
        for row, dear in [
            *rows,
            (payloads.MATHS, True),
            (payloads.user_row(place.folder, "compared"), False),
        ]:
            yield from _outcomes(
                pool,
                row,
                marks,
                place.of(marks.payloads(shapes=payloads.SHAPES[: 2 if dear else None]), few=8),
            )
    evaluated = payloads.user_row(place.folder, "evaluated")
    for payload in place.of(marks.payloads(shapes=("{}",)), few=4):
        # this reward evaluates the payload in its own process, so only effects outside that process count
        with RewardPool(1) as pool:
            pool.score(evaluated.scorer, ["completion", "answer"], [[payload, ""]], SECONDS)
        yield Outcome(True, True, True, _acted(marks))


def _outcomes(
    pool: RewardPool, row: payloads.Row, marks: payloads.Marks, texts: list[str]
) -> Iterator[Outcome]:
    for found in payloads.judge(pool, row, texts, SECONDS):
        yield Outcome(
            True, not found.scored, not found.neighbours, found.scored or found.neighbours or _acted(marks)
        )


def _acted(marks: payloads.Marks) -> bool:
    acted = marks.acted()
    marks.mark.unlink(missing_ok=True)
    return acted


CLASSES = {"completions that are programs": everywhere}
