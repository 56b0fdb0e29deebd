"""Supervise a service's process: a thread checks that it is alive and responding, and restarts it if not."""

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

PAUSES = (0.0, 1.0, 5.0)  # seconds before each restart; a process is restarted at most this many times
LOOK = 0.1  # seconds between health checks while a service starts
PROBE = 2.0  # seconds between health checks once the service serves
IDLE = 0.02  # share of a processor; a silent process that uses less counts as idle

Note = Callable[[str], object]


class Member:
    """Starts a service's process, waits until it is healthy, and keeps it running.

    ``changed``: called whenever the state of the process changes, from any thread.
    """

    def __init__(
        self, recipe: Recipe, log: Path, run: str, note: Note, changed: Callable[[], object]
    ) -> None:
        self.recipe, self.log, self._run, self._note, self._changed = recipe, log, run, note, changed
        self.state, self.starts = "starting", 0
        self.until = 0.0  # during a restart: the time by which it must serve again, on the monotonic clock
        self.process: ServiceProcess | None = None
        self._closing, self.over = threading.Event(), False
        self._lock = threading.Lock()  # held around starts, so that nothing is started after the end
        self._thread = threading.Thread(target=self._keep, name=f"service {recipe.name}", daemon=True)

    def start(self) -> None:
        """Start the process. Raises OSError if the command can't be started."""
        with self._lock:
            if not self._closing.is_set():
                self.process = ServiceProcess(self.recipe.command, self.log, self.recipe.variables, self._run)
                self.starts += 1

    def wait_until_serving(self) -> str:
        """Wait until the process is serving. Return "" if it is, or the reason why it isn't."""
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
        """Start a thread that supervises the process. Call this once it is serving."""
        self._is("serving")
        self._thread.start()

    def move_log(self, folder: Path) -> None:
        """Move the process's log to ``folder``, which must be on the same filesystem. Raises OSError.

        The process keeps writing to the moved file.
        """
        with self._lock:
            endings = itertools.chain([""], (f".{again}" for again in itertools.count(2)))
            places = (folder / f"{self.recipe.name}{last}.log" for last in endings)
            # logs of earlier processes of the run are kept
            place = next(each for each in places if not each.exists())
            os.rename(self.log, place)
            self.log = place

    def ask_to_end(self) -> None:
        """Ask the process to end, and don't restart it."""
        self._closing.set()
        with self._lock:
            if self.process is not None:
                self.process.ask_to_end()

    def end(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the process to end, then kill it."""
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
            why = self._wait_for_failure()
            if self._closing.is_set():
                return
            self.state, self.until = "starting", time.monotonic() + pause + self.recipe.wait
            self._changed()
            self._note(
                f"service '{self.recipe.name}' {why}; restarting it ({number} of {len(PAUSES)}); its log: "
                f"{self.log}"
            )
            if self._closing.wait(pause):
                return
            # if the command no longer exists, the dead process stays in ``process``
            with contextlib.suppress(OSError):
                self.start()
        why = self._wait_for_failure()
        if not self._closing.is_set():
            self._is("dead")
            self._note(
                f"service '{self.recipe.name}' {why}, and is not restarted any more: from now on, rewards of "
                "rows that need it are missing"
            )

    def _wait_for_failure(self) -> str:
        """Wait until the process ends, and kill it if it neither responds nor computes for too long.

        Returns what happened as text, or "" if the service is being closed.
        """
        process = self.process
        assert process is not None
        silence = Silence(self.recipe.wait, process.worked)
        while not self._closing.is_set():
            code = process.ended_within(PROBE if self.state == "serving" else LOOK)
            if code is not None:
                process.end()  # child processes of the dead process may still be running and using its port
                return ending(code)
            why = unhealthy(self.recipe.url, self.recipe.health, PROBE)
            self._is("silent" if why and self.state != "starting" else "starting" if why else "serving")
            if silence.lasts(bool(why)):
                process.end()
                return f"was silent and idle for {self.recipe.wait:g} s ({why}) and was killed"
        return ""


class Silence:
    """Measures how long a process has been neither responding nor computing.

    Time during which this process itself couldn't check isn't counted.
    """

    def __init__(
        self, most: float, worked: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Start measuring.

        ``most``: how many seconds of silence are allowed. ``worked``: returns how many CPU seconds the
        process has used so far. ``clock``: returns the time in seconds.
        """
        self._most, self._worked, self._clock = most, worked, clock
        self._idle, self._looked, self._used = 0.0, clock(), worked()

    def lasts(self, silent: bool) -> bool:
        """Record the result of a health check, and return whether the silence has gone on for too long.

        ``silent``: true if the process didn't respond to the check.
        """
        now, used = self._clock(), self._worked()
        elapsed = min(now - self._looked, 3 * PROBE)
        busy = used - self._used > IDLE * elapsed
        self._idle = self._idle + elapsed if silent and not busy else 0.0
        self._looked, self._used = now, used
        return self._idle > self._most
