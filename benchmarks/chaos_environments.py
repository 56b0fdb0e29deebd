"""Environments that kill their process, hang, return a wrong type, raise or are slow during an episode.

Each episode with such a fault counts. Detected: the episode failed with the right cause. Survived: the run
continued without the episode. Wrong: another episode in the same processes differs from the run without
faults. A slow episode must not fail; it counts as detected if it does not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import run_faults as faults  # of tests/runs
from chaos_folders import Outcome, Place

import rlflow

ENVIRONMENT = """
import os, signal, time
from rlflow import Turn

def lie(): return "no turn"
def fail(): raise ValueError("an episode went wrong")
ACTIONS = {"kill": lambda: os.kill(os.getpid(), signal.SIGKILL), "exit": lambda: os._exit(3), "hang": lambda: time.sleep(3600), "lie": lie,
           "raise": fail, "slow": lambda: time.sleep(0.1)}

class Faulty:
    def __init__(self, *, mode: str = ""):
        self.mode, self.turn = mode, 0

    def reset(self, prompt, *, seed):
        self.hit, self.seed = int(prompt.split()[-1]) % 4 == 1, seed

    def step(self, said):
        self.turn += 1
        if self.turn == 2 and self.hit and self.mode:
            given = ACTIONS[self.mode]()
            if given is not None:
                return given
        return Turn(says=f"{self.seed % 97} ", reward=len(said) % 3, done=self.turn == 3, log={"hit": self.hit} if self.turn == 1 else {})
"""
# name of the fault → cause of the missing row
MODES = {"kill": "died", "exit": "died", "hang": "timeout", "lie": "type", "raise": "raised", "slow": ""}
ROWS = 16  # rows in an iteration


def failing(place: Place) -> Iterator[Outcome]:
    """Run three iterations with each kind of fault."""
    (place.folder / "faulty.py").write_text(ENVIRONMENT)
    faults.in_child(partial(_run, place.folder, "straight", ""))
    whole, rows = _lines(place.folder, "straight", "metrics"), _lines(place.folder, "straight", "samples")
    for mode, cause in [(mode, MODES[mode]) for mode in place.of(MODES, 3)]:
        code = faults.in_child(partial(_run, place.folder, mode, mode))
        lines, others = _lines(place.folder, mode, "metrics"), _lines(place.folder, mode, "samples")
        wrong = any(
            one["episode"] != other["episode"]
            for one, other in zip(rows, others, strict=False)
            if other["finish"] != "failed"
        )
        for line, straight in zip(lines, whole, strict=False):
            hits = round(straight["env/hit"] * ROWS)
            failed = line.get(f"reward/missing_env_{cause}", 0) if cause else hits - line["env/failed"] * ROWS
            for row in range(hits):
                yield Outcome(True, row < failed, code == 0 and row < failed, wrong)


def _run(folder: Path, name: str, mode: str, file: str = "faulty.py:Faulty", **settings: Any) -> None:
    rlflow.run(
        "grpo",
        backend="null",
        prompts=4,
        iterations=3,
        held_out=0,
        out=str(folder / "runs"),
        name=name,
        max_missing=1.0,
        **{
            "hp.samples": 4,
            "hp.max_tokens": 60,
            "actor.longest": 12,
            "env": f"{folder}/{file}",
            "env.mode": mode,
            "env.turns": 3,
            "env.seconds": 1.0,
            "env.parallel": 2,
            **settings,
        },
    )


def _lines(folder: Path, name: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs" / name / f"{file}.jsonl").read_text().splitlines()]


SPEAKER = """
from rlflow import Turn

TEXTS = {"surrogate": "7 \\ud83c", "zero": "7\\0", "message": [{"role": "user", "content": "7 \\udc80"}], "endless": "7 " * (1 << 18)}

class Speaker:
    def __init__(self, *, mode: str = "", first: bool = False):
        self.text, self.first, self.turn = TEXTS.get(mode, "7"), first, 0

    def reset(self, prompt, *, seed):
        self.odd = int(prompt.split()[-1]) % 4 == 1
        return self.text if self.odd and self.first else "7"

    def step(self, said):
        self.turn += 1
        return Turn(says=self.text if self.odd and not self.first else "7", reward=1.0, done=self.turn == 2)
"""


def speaking(place: Place) -> Iterator[Outcome]:
    """Let an environment send too much text, or characters that no tokenizer accepts.

    The run must cut or replace the text and count the message. No episode may fail.
    """
    (place.folder / "speaker.py").write_text(SPEAKER)
    for mode in place.of(("surrogate", "zero", "message", "endless"), 4):
        for first in (False, True):
            if first and mode == "message":
                continue  # `reset` returns a string, not messages
            name = f"{mode}-{first}"
            code = faults.in_child(
                partial(_run, place.folder, name, mode, file="speaker.py:Speaker", **{"env.first": first})
            )
            lines = _lines(place.folder, name, "metrics") if code == 0 else []
            counted = "env/cut" if mode == "endless" else "env/replaced"
            for line in lines or [{}]:
                yield Outcome(True, line.get(counted, 0) > 0, line.get("env/failed") == 0, code != 0)


CLASSES: dict[str, Callable[[Place], Iterator[Outcome]]] = {
    "environment dies, hangs, lies or is slow": failing,
    "environment sends text that no tokenizer accepts": speaking,
}
