"""The watchdog's own process: it looks a few times a second at the process beside which it runs.

- A node that has passed its deadline while C code keeps the interpreter's lock cannot be ended from within: the run is ended from here,
  and so is one that was asked to stop and whose interpreter does not answer.
- Of a process that has vanished it says so, in words and in status.json.
- Whatever way the process ends, what the run has started, and the private folders that it has made, go too.

It is started by path, with nothing but the standard library, so that it is there within milliseconds: ``beside.py`` says how, and what it
is told. Time in which the process is stopped (SIGSTOP, ctrl-Z), or in which this one cannot run, counts for nothing.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

from . import kin, private, stacks
from .board import Board, NodeUnderWay

TICK = 0.25  # seconds between two looks
SILENT_SECONDS = 1.5  # without a beat, after which the interpreter counts as held
GRACE_SECONDS = 1.5  # after a deadline, in which the run ends by itself if its interpreter runs
ASKED_SECONDS = 5.0  # how long a run that was asked to stop may keep its interpreter's lock
AGAIN_SECONDS = 1.0  # the same where it was asked twice
GONE_SECONDS = 5.0  # how long a killed process may take to be gone
SHOWN = 4  # of the nodes that were under way
RUNNER = "/rlflow/execution/"  # in the paths of the files that call nodes: what a stack shows ends there
STEP = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,6}))?")
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that ask a run to stop
FAILED, INTERRUPTED = 1, 130  # exit codes
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)  # which a process brings upon itself


@dataclass(frozen=True)
class WatchedRun:
    """A run. folder: as the user knows it; path: the same from the root. stacks: the descriptor to which its process writes them."""

    folder: str
    path: str
    stacks: int


@dataclass
class Dog:
    """Watches the process ``pid``, which was ``started`` then. name: of the run, in the mark. silent: seconds without a beat. ran: of each
    node under way the seconds in which the process could run. asked: seconds since it was asked to stop, for each time. folders:
    private ones, removed in the end."""

    pid: int
    started: str
    name: str
    board: Board
    told: WatchedRun | None = None
    ended: bool = False
    folders: list[str] = field(default_factory=list)
    forks: list[kin.Known] = field(default_factory=list)
    silent: float = 0.0
    beats: int = -1
    ran: dict[int, float] = field(default_factory=dict)
    asked: list[float] = field(default_factory=list)
    entries: list[NodeUnderWay] = field(default_factory=list)
    warned: bool = False

    # -- what it is told ---------------------------------------------------------------------------------------------------------

    def hear(self, message: dict[str, Any]) -> None:
        if "run" in message:
            self.told = WatchedRun(**message["run"]) if message["run"] else None
        elif "folder" in message:
            self.folders.append(message["folder"])
        elif "fork" in message:
            start = kin.started(message["fork"])
            self.forks += [(message["fork"], start)] if start else []
        self.ended |= "end" in message

    def signalled(self, numbers: bytes) -> None:
        """Signals that asked the process to stop. A second one that is no ctrl-C asks for nothing more; two at once are one, which came
        over two ways."""
        for number in numbers:
            again = number == signal.SIGINT and self.asked and self.asked[-1] > 2 * TICK
            if again or (number in STOPPING and not self.asked):
                self.asked.append(0.0)

    # -- what it sees ------------------------------------------------------------------------------------------------------------

    def look(self, state: str, passed: float) -> tuple[int, str] | None:
        """How the run must be ended and why, if it must. ``passed``: seconds since the last look."""
        passed = 0.0 if state in "Tt" else min(passed, 2 * TICK)
        beats = self.board.beats
        self.silent = 0.0 if beats != self.beats else self.silent + passed
        self.beats, self.entries = beats, self.board.entries()
        self.ran = {entry.number: self.ran.get(entry.number, 0.0) + passed for entry in self.entries}
        self.asked = [seconds + passed for seconds in self.asked]
        if self.silent < SILENT_SECONDS or not self.entries:
            return None
        return self._late() or self._deaf()

    def _late(self) -> tuple[int, str] | None:
        late = next((entry for entry in self.entries if self.ran[entry.number] > entry.seconds + GRACE_SECONDS), None)
        if late is None:
            return None
        return FAILED, (f"stage '{late.name}' failed in iteration {late.iteration}: no result after its deadline of {late.seconds:g} s, "
                        "and its code keeps the interpreter's lock: the run's process was killed")  # fmt: skip

    def _deaf(self) -> tuple[int, str] | None:
        held = [min(seconds, self.silent) for seconds in self.asked]
        if (held and held[0] > ASKED_SECONDS) or (len(held) > 1 and held[1] > AGAIN_SECONDS):
            return INTERRUPTED, f"stopped: {_named(self.entries[0])} kept the interpreter's lock for {self.silent:.0f} s"
        if held and not self.warned:
            self.warned = True
            say(f"stopping: {_named(self.entries[0])} keeps the interpreter's lock; if it does not let go within "
                f"{ASKED_SECONDS - held[0]:.0f} s the run ends as it was last saved")
        return None

    # -- what it does ------------------------------------------------------------------------------------------------------------

    def stop(self, code: int, why: str) -> None:
        """End the process, which cannot end itself, with all that the run has started."""
        where = self._stacks()
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        limit = time.monotonic() + GONE_SECONDS
        while kin.lives(self.pid, self.started) and time.monotonic() < limit:
            time.sleep(0.02)
        self.clear()
        self._leave_word("failed" if code == FAILED else "interrupted", "\n".join(filter(None, [why, where])))

    def vanished(self, found: kin.Stat | None) -> None:
        """The process has ended without a word: killed, or by a call that leaves no time for one."""
        self.clear()
        self.entries = self.board.entries()
        if self.told is None or not self._status():
            return
        code = os.waitstatus_to_exitcode(found.status) if found is not None else None
        if code is not None and (code >= 0 or -code in CRASHES):
            how = f"exited with code {code}" if code >= 0 else f"crashed with {_signal_name(-code)}"
            self._leave_word("failed", f"the run's process {how}{self._meanwhile()}")
        else:  # who reads status.json sees that the process is gone
            how = f"was killed by {_signal_name(-code)}" if code is not None else "has ended without a word"
            say(f"the run's process {how}{self._meanwhile()}\n{self._how_to_go_on()}")

    def clear(self) -> list[int]:
        """End what the run has started; what is left."""
        left = kin.end_all(lambda: kin.marked(self.name) + kin.still(self.forks))
        for folder in self.folders:
            private.remove(folder)
        for path in glob.glob(f"{glob.escape(tempfile.gettempdir())}/rlflow-{self.name}-*.reward"):  # folders of rewards
            shutil.rmtree(path, ignore_errors=True)
        return left

    def _signal(self, number: int) -> None:
        if kin.lives(self.pid, self.started):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def _stacks(self) -> str:
        if self.told is None or self.told.stacks < 0:
            return ""
        dump = stacks.written(self.pid, self.told.stacks, lambda: self._signal(signal.SIGUSR2))
        return stacks.shown(dump, lambda path, name: RUNNER in path)

    def _meanwhile(self) -> str:
        return f" while {', '.join(map(_named, self.entries[:SHOWN]))} ran" if self.entries else ""

    # -- what it leaves ----------------------------------------------------------------------------------------------------------

    def _leave_word(self, state: str, why: str) -> None:
        how = self._how_to_go_on()
        self._write_status(state, f"{why}\n{how}")
        say(f"{why}\n{how}")

    def _how_to_go_on(self) -> str:
        """What of the run is saved, in words."""
        assert self.told is not None
        found = []
        with contextlib.suppress(OSError):
            folder = os.path.join(self.told.path, "checkpoints")
            steps = [step for name in os.listdir(folder) if (step := STEP.fullmatch(name)) is not None]
            found = [step for step in steps if os.path.isfile(os.path.join(folder, step[0], "manifest.json"))]
        if not found:
            return "no checkpoint was written: start the run again"
        newest = max(found, key=lambda step: (int(step[1]), int(step[2] or 1)))
        return f"saved as {newest[0]}; go on with: rlflow resume {self.told.folder}"

    def _status(self) -> dict[str, Any]:
        """status.json, where it is this process's and says that it runs."""
        assert self.told is not None
        try:
            with open(os.path.join(self.told.path, "status.json")) as file:
                found = json.load(file)
            return found if found["state"] == "running" and found["process"]["pid"] == self.pid else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _write_status(self, state: str, error: str) -> None:
        found = self._status()
        if not found or self.told is None:
            return
        finished = max(found.get("iteration", 0), *(entry.iteration for entry in self.entries), 0)
        aside = os.path.join(self.told.path, f".status.json.{os.getpid()}")
        try:
            with open(aside, "w") as file:
                file.write(json.dumps({**found, "state": state, "error": error, "updated": time.time(), "iteration": finished}) + "\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, os.path.join(self.told.path, "status.json"))
        except OSError as raised:
            say(f"the state of the run cannot be written to {self.told.folder}: {raised.strerror}")


def _named(entry: NodeUnderWay) -> str:
    return f"stage '{entry.name}' of iteration {entry.iteration}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def say(text: str) -> None:
    """To the terminal of the run, whose cursor a live view may have hidden; to nobody where that is gone."""
    with contextlib.suppress(OSError):
        shown = "\x1b[?25h\n" if os.isatty(2) else ""
        os.write(2, f"{shown}{text}\n".encode(errors="backslashreplace"))


# -- the process ---------------------------------------------------------------------------------------------------------------


def watch(dog: Dog, commands: int, signals: int) -> int | None:
    """Until the run is over, its process has ended, or was ended with the exit code that is returned."""
    poll, lines, last = select.poll(), b"", time.monotonic()
    for file in (commands, signals):
        os.set_blocking(file, False)
        poll.register(file, select.POLLIN)
    while True:
        poll.poll(TICK * 1000)
        *whole, lines = (lines + _read(commands, poll)).split(b"\n")
        for line in whole:
            with contextlib.suppress(ValueError):
                dog.hear(json.loads(line))
        dog.signalled(_read(signals, poll))
        if dog.ended:
            dog.clear()
            return None
        found, now = kin.stat(dog.pid), time.monotonic()
        if found is None or found.state in "ZX" or found.started != dog.started:
            dog.vanished(found if found is not None and found.started == dog.started else None)
            return None
        if (verdict := dog.look(found.state, now - last)) is not None:
            dog.stop(*verdict)
            return verdict[0]
        last = now


def _read(file: int, poll: select.poll) -> bytes:
    """What is there; a pipe whose other end is closed is looked at no more."""
    try:
        data = os.read(file, 1 << 16)
    except BlockingIOError:
        return b""
    if not data:
        with contextlib.suppress(KeyError):
            poll.unregister(file)
    return data


def main() -> None:
    """Arguments: the process and when it started, the run's name, and descriptors: of the board, commands, signals, and the launcher's pipe
    (-1 where there is none). Standard output is closed when all is done."""
    if os.fork():  # to be nobody's child: who ends all of its children would end this
        os._exit(0)
    os.chdir("/")
    for number in (*STOPPING, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, f"{os.getpid()}\n".encode())
    pid, started, name, *files = sys.argv[-7:]
    board, commands, signals, launcher = map(int, files)
    code = watch(Dog(int(pid), started, name, Board(board)), commands, signals)
    if code is not None and launcher >= 0:
        with contextlib.suppress(OSError):
            os.write(launcher, b"v" + bytes([code]))
