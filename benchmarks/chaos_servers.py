"""Reward servers that fail: they answer late, reset connections, or return no valid score for each row.

Each row without a valid answer is a fault. Detected: the row's score is missing, with the right cause.
Survived: the run continued without the row. Wrong: a row has a wrong score.
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

ROWS = 16  # rows in an iteration, which form one batch
SECONDS = 0.5  # time limit for a batch


def _late(handler: Any, question: Any) -> bool:
    return bool(handler.server.released.wait(60)) or True


def _some(handler: Any, question: Any, value: Any) -> bool:
    return bool(handler.say({"rewards": [value, *lengths(question)[1:]]}))


# name → (cause, how many rows of a batch lose their score, how the server fails)
FAILURES: dict[str, tuple[str, int, Callable[[Any, Any], bool]]] = {
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
    """Run three iterations with each failure. The server fails in the second iteration."""
    for name, (cause, cost, fail) in [(name, FAILURES[name]) for name in place.of(FAILURES, 4)]:
        folder = place.folder / name.replace(" ", "-")
        failed: set[str] = set()

        def behave(handler: Any, question: Any, fail: Any = fail, failed: set[str] = failed) -> bool:
            request = json.dumps(question)
            if len(failed) == 0 and len(handler.server.questions) == 2:
                failed.add(request)
            return request in failed and bool(fail(handler, question))

        with serving(behave) as server:
            code = faults.in_child(partial(_run, server.url, folder))
        lines = bad_days.lines(folder / "grpo-1")
        missing = [int(line["reward/missing"]) for line in lines]
        named = int(lines[1].get(f"reward/missing_get_reward/{cause}", 0)) if len(lines) > 1 else 0
        wrong = missing != [0, cost, 0]
        for row in range(cost):
            yield Outcome(True, row < named, code == 0 and len(lines) == 3, wrong)


def _moved(handler: Any) -> bool:
    handler.send_response(307)
    handler.send_header("Location", "/elsewhere")
    handler.send_header("Content-Length", "0")
    handler.end_headers()
    return True


# name → what the server does with one request before it answers
PASSING: dict[str, Callable[[Any], bool]] = {
    "503": lambda handler: bool(handler.say(b"overloaded", 503)),
    "429": lambda handler: bool(handler.say(b"slow down", 429)),
    "502": lambda handler: bool(handler.say(b"<html>", 502)),
    "reset": lambda handler: bool(handler.reset()),
    "redirect": _moved,
}


def passing(place: Place) -> Iterator[Outcome]:
    """Run three iterations with each temporary failure, which a retry overcomes.

    Each affected row is a fault. Detected: the request was sent again. Survived: the row has its score.
    Wrong: the row has another score.
    """
    for name, fail in [(name, PASSING[name]) for name in place.of(PASSING, 3)]:
        folder = place.folder / f"passing-{name}"

        def behave(handler: Any, question: Any, fail: Any = fail) -> bool:
            return len(handler.server.questions) == 2 and bool(fail(handler))

        with serving(behave) as server:
            code = faults.in_child(partial(_run, server.url, folder, 30.0))
        lines = bad_days.lines(folder / "grpo-1")
        rows = [json.loads(line) for line in (folder / "grpo-1" / "samples.jsonl").read_text().splitlines()]
        wrong = any(row["scores"] is not None and row["scores"] != len(row["completion"]) for row in rows)
        for _ in range(ROWS):
            yield Outcome(
                True,
                len(server.questions) == 4,
                code == 0 and all(line["reward/missing"] == 0 for line in lines),
                wrong,
            )


def _run(url: str, out: Path, seconds: float = SECONDS) -> None:
    rlflow.run(
        "grpo",
        backend="null",
        prompts=8,
        iterations=3,
        threads=1,
        max_missing=1.0,
        held_out=0,
        reward=url,
        reward_timeout=seconds,
        out=str(out),
        **{"hp.samples": 2},
    )


CLASSES: dict[str, Callable[[Place], Iterator[Outcome]]] = {
    "reward server fails": failing,
    "reward server is busy for a while": passing,
}
