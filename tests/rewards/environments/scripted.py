"""Scripted environments. The prompt of an episode is its script, as JSON: {"reset": …, "turns": [{"says": …,
"reward": …}, …]}."""

import asyncio
import json
import os
import signal
import time
from typing import Any

from rlflow import Turn

LEFT = {"died": "exit", "hung": "hang"}


class Scripted:
    """Answers each turn as in the script, and with nothing after its end."""

    def __init__(self, *, factor: float = 1.0):
        self.factor, self.turn = factor, 0

    def reset(self, prompt: str, *, seed: int) -> Any:
        self.script = json.loads(prompt)
        self.seed = seed
        return acted(self.script.get("reset"))

    def step(self, said: str) -> Any:
        turns = self.script.get("turns", [])
        entry = turns[self.turn] if self.turn < len(turns) else {}
        self.turn += 1
        entry = acted(entry)
        if not isinstance(entry, dict):
            return entry
        entry = dict(entry)
        if entry.pop("echo", False):
            entry["says"] = f"{said}|{self.seed % 1000}"
        return Turn(**{**entry, "reward": entry.get("reward", 0.0) * self.factor})


class Once(Scripted):
    repeatable = False


class Judged(Scripted):
    def score(self) -> Any:
        return acted(self.script.get("score", 0.5))


class Later:
    """The same with async methods."""

    def reset(self, prompt, *, seed):
        self.own = Scripted()
        return self.own.reset(prompt, seed=seed)

    async def step(self, said):
        await WAITS[self.own.script.get("waits", "no")]()
        return self.own.step(said)


async def no():
    """Wait for nothing."""


async def ever():
    await asyncio.Event().wait()


MET = []


async def meets():
    """Wait until three calls are here."""
    MET.append(mine := asyncio.Event())
    if len(MET) == 3:
        for event in MET:
            event.set()
    await mine.wait()


WAITS = {"no": no, "ever": ever, "meets": meets}


class Drifting(Scripted):
    """Gives other answers in a replay."""

    def step(self, said):
        return Turn(says=f"{os.getpid()}") if not self.script.get("turns") else super().step(said)


class Closing:
    """Reports how many of its kind were closed in this process."""

    closed = 0

    def step(self, said):
        if said == "fail":
            raise ValueError(said)
        return said if said == "lie" else Turn(says=f"{type(self).closed} closed")

    def close(self):
        type(self).closed += 1


class ClosingLater(Closing):
    closed = 0

    async def close(self):
        super().close()


class Silent:
    """Never sends a message."""

    def step(self, said):
        return Turn()


def acted(entry):
    """Return the entry, or carry out what it does to its process."""
    match entry:
        case {"exit": code}:
            os._exit(code)
        case {"kill": _}:
            os.kill(os.getpid(), signal.SIGKILL)
        case {"hang": _}:
            print("hangs", end="", flush=True)
            time.sleep(3600)
        case {"raise": text}:
            raise ValueError(text)
        case {"give": value}:
            return value
    return entry
