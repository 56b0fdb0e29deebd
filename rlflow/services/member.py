"""A process of a service, kept up: a thread sees whether it lives and answers, and starts it anew where it
does not."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from rlflow.services.probe import unhealthy
from rlflow.services.recipes import Recipe
from rlflow.services.service_process import ServiceProcess, ending

PAUSES = (0.0, 1.0, 5.0)  # seconds before each new start: a process that dies is started anew so many times
LOOK = 0.1  # seconds between two looks while a service is awaited
PROBE = 2.0  # seconds between two questions for its health afterwards
IDLE = 0.02  # of a processor: who uses less while silent does nothing

Note = Callable[[str], object]


class Member:
    """Starts a process, awaits its health and keeps it up. ``changed`` is called, from several threads, where
    its state is another."""

    def __init__(
        self, recipe: Recipe, log: Path, run: str, note: Note, changed: Callable[[], object]
    ) -> None:
        self.recipe, self.log, self._run, self._note, self._changed = recipe, log, run, note, changed
        self.state, self.starts = "starting", 0
        self.until = 0.0  # second of the monotonic clock by which it serves again, while it is started anew
        self.process: ServiceProcess | None = None
        self._closing, self.over = threading.Event(), False
        self._lock = threading.Lock()  # around starts, so that none comes after the end
        self._thread = threading.Thread(target=self._keep, name=f"service {recipe.name}", daemon=True)

    def start(self) -> None:
        """Start the process. Raises OSError where its command cannot be started."""
        with self._lock:
            if not self._closing.is_set():
                self.process = ServiceProcess(self.recipe.command, self.log, self.recipe.variables, self._run)
                self.starts += 1

    def awaited(self) -> str:
        """Wait until it serves. Gives why it does not; an empty text where it does."""
        process = self.process
        assert process is not None
        limit, why = process.began + self.recipe.wait, ""
        while True:
            left = limit - time.monotonic()
            if (code := process.ended_within(min(LOOK, max(left, 0.0)))) is not None:
                return f"it {ending(code)} after {time.monotonic() - process.began:.1f} s"
            why = unhealthy(self.recipe.url, self.recipe.health, min(max(left, LOOK), PROBE))
            if not why:
                return ""
            if left <= 0:
                return f"{why}, {self.recipe.wait:g} s after its start"

    def keep(self) -> None:
        """Keep it up from now on: it serves."""
        self._is("serving")
        self._thread.start()

    def move_log(self, folder: Path) -> None:
        """Move what it prints, now and from now on, into a folder of the same file system. Raises OSError."""
        with self._lock:
            endings = itertools.chain([""], (f".{again}" for again in itertools.count(2)))
            places = (folder / f"{self.recipe.name}{last}.log" for last in endings)
            # those of earlier processes of the run stay
            place = next(each for each in places if not each.exists())
            os.rename(self.log, place)
            self.log = place

    def ask_to_end(self) -> None:
        """Start it no more, and ask it to end."""
        self._closing.set()
        with self._lock:
            if self.process is not None:
                self.process.ask_to_end()

    def end(self, seconds: float) -> None:
        """End it within so many seconds, killed where it does not end itself."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(seconds + PROBE)
        with self._lock:
            if self.process is not None:
                self.process.end(seconds)
        self.over = True
        if self.state != "dead":
            self._is("ended")

    def _is(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._changed()

    def _keep(self) -> None:
        for number, pause in enumerate(PAUSES, 1):
            why = self._watched()
            if self._closing.is_set():
                return
            self.state, self.until = "starting", time.monotonic() + pause + self.recipe.wait
            self._changed()
            self._note(
                f"service '{self.recipe.name}' {why}; it is started anew ({number} of {len(PAUSES)}); it "
                f"printed into {self.log}"
            )
            if self._closing.wait(pause):
                return
            # a command that is gone: the process before it stays the last one, and is dead
            with contextlib.suppress(OSError):
                self.start()
        why = self._watched()
        if not self._closing.is_set():
            self._is("dead")
            self._note(
                f"service '{self.recipe.name}' {why}, and is started no more: rows that need it are "
                "missing from here on"
            )

    def _watched(self) -> str:
        """Wait for the end of the process, or for a silence in which it does nothing: then it is killed.
        Gives what happened."""
        process = self.process
        assert process is not None
        silence = Silence(self.recipe.wait, process.worked)
        while not self._closing.is_set():
            code = process.ended_within(PROBE if self.state == "serving" else LOOK)
            if code is not None:
                process.end()  # what it has started may live on, and hold its port
                return ending(code)
            why = unhealthy(self.recipe.url, self.recipe.health, PROBE)
            self._is("silent" if why and self.state != "starting" else "starting" if why else "serving")
            if silence.lasts(bool(why)):
                process.end()
                return f"was silent and idle for {self.recipe.wait:g} s ({why}) and was killed"
        return ""


class Silence:
    """How long a process has neither answered nor computed. Time in which this process could not look does
    not count."""

    def __init__(
        self, most: float, worked: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``most``: seconds that are allowed; ``worked``: gives the seconds of processor time that it has
        used; ``clock``: gives seconds."""
        self._most, self._worked, self._clock = most, worked, clock
        self._idle, self._looked, self._used = 0.0, clock(), worked()

    def lasts(self, silent: bool) -> bool:
        """Whether it has lasted too long, now that the process was asked and was silent, or was not."""
        now, used = self._clock(), self._worked()
        elapsed = min(now - self._looked, 3 * PROBE)
        busy = used - self._used > IDLE * elapsed
        self._idle = self._idle + elapsed if silent and not busy else 0.0
        self._looked, self._used = now, used
        return self._idle > self._most
