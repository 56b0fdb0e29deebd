"""Servers that judge rows and fail: late, gone, resetting, or answering what is no number for each row.

A fault is a row of an iteration whose answer failed. It is detected where it is missing by its cause, survived where the run goes on
without it, and wrong where it, or a row that was answered, has another score than it should.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import run_faults as faults  # of tests/runs
import test_bad_days as bad_days
from chaos_folders import Outcome, Place
from servers import lengths, serving  # of tests/rewards

import rlflow

ROWS = 16  # of an iteration: one batch
SECONDS = 0.5  # for a batch


def _late(handler: Any, question: Any) -> bool:
    return bool(handler.server.released.wait(60)) or True


def _some(handler: Any, question: Any, value: Any) -> bool:
    return bool(handler.say({"rewards": [value, *lengths(question)[1:]]}))


FAILURES: dict[str, tuple[str, int, Callable[[Any, Any], bool]]] = {  # name → (cause, rows of a batch that it costs, how the server fails)
    "late": ("timeout", ROWS, _late),
    "reset": ("connection", ROWS, lambda handler, question: handler.reset()),
    "500": ("status", ROWS, lambda handler, question: handler.say(b"out of memory", 500)),
    "no JSON": ("reply", ROWS, lambda handler, question: handler.say(b"<html>")),
    "short": ("count", ROWS, lambda handler, question: handler.say({"rewards": lengths(question)[1:]})),
    "NaN": ("nan", 1, partial(_some, value=math.nan)),
    "text": ("type", 1, partial(_some, value="1.0")),
    "null": ("none", 1, partial(_some, value=None)),
}


def failing(place: Place) -> Iterator[Outcome]:
    """Three iterations each, of which the server fails the second."""
    for name, (cause, cost, fail) in [(name, FAILURES[name]) for name in place.of(FAILURES, 4)]:
        folder = place.folder / name.replace(" ", "-")
        failed: set[str] = set()

        def behave(handler: Any, question: Any, fail: Any = fail, failed: set[str] = failed) -> bool:
            asked = json.dumps(question)
            if len(failed) == 0 and len(handler.server.questions) == 2:
                failed.add(asked)
            return asked in failed and bool(fail(handler, question))

        with serving(behave) as server:
            code = faults.in_child(partial(_run, server.url, folder))
        lines = bad_days.lines(folder / "grpo-1")
        missing = [int(line["reward/missing"]) for line in lines]
        named = int(lines[1].get(f"reward/missing_get_reward/{cause}", 0)) if len(lines) > 1 else 0
        wrong = missing != [0, cost, 0]
        for row in range(cost):
            yield Outcome(True, row < named, code == 0 and len(lines) == 3, wrong)


def _run(url: str, out: Path) -> None:
    rlflow.run("grpo", backend="null", prompts=8, iterations=3, threads=1, max_missing=1.0, held_out=0, reward=url, reward_timeout=SECONDS,
               out=str(out), **{"hp.samples": 2})  # fmt: skip


CLASSES: dict[str, Callable[[Place], Iterator[Outcome]]] = {"server of rewards fails": failing}
