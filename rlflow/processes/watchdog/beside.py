"""The watchdog's handle in the process that it watches: starts the watchdog and sends it messages."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from rlflow.processes.watchdog import kin, launcher, private
from rlflow.processes.watchdog.board import Board
from rlflow.processes.watchdog.stacks import show_stacks

BEAT_SECONDS = 0.25  # between two heartbeats, which say that the interpreter lets its threads run
CLOSE_SECONDS = 10.0  # the watchdog may take to end what a run has started
STARTS = 3  # how often the watchdog is started; it may be killed itself
# of this package, but of no other of ours
CODE = "import sys; sys.path.append(sys.argv[1]); from watchdog.dog import main; main()"


class ProcessExit(BaseException):
    """A stage called ``os._exit``. It is no Exception, so that a stage's own handlers do not catch it."""


class Watchdog:
    """The watchdog of this process. It works on Linux alone; elsewhere nothing is watched."""

    def __init__(self) -> None:
        # in the mark of processes that this one starts, and in names of its private folders
        self.name = secrets.token_hex(8)
        self.pid = os.getpid()
        self.board = Board()  # where nodes under way are written down
        self.signals = -1  # descriptor that takes the number of each signal; -1 where nothing is watched
        self.process: int | None = None  # pid of the watchdog, once it has said so
        self._over, self._run_message = threading.Event(), b""
        self._folders: list[Path] = []
        self._files: list[int] = []
        self._commands = -1
        self._thread: threading.Thread | None = None

    @classmethod
    def start(cls) -> Watchdog:
        """Start a watchdog of this process. Where no process, thread or memory can be had for it, the run
        goes on without one."""
        dog = cls()
        if sys.platform == "linux":
            try:
                dog._open()
            except (OSError, RuntimeError):  # RuntimeError: no thread can be started
                dog._shut()
        return dog

    def _open(self) -> None:
        self.board = Board.new()
        (self._command_end, self._commands), (self._signal_end, self.signals) = os.pipe(), os.pipe()
        self._files = [self._command_end, self._commands, self._signal_end, self.signals]
        for file in (self._commands, self.signals):
            os.set_blocking(file, False)
        self._thread = threading.Thread(
            target=self._beat, args=(self._spawned(),), name="watchdog", daemon=True
        )
        self._thread.start()
        self.refuse_exits()

    def refuse_exits(self) -> None:
        """Make calls of ``os._exit`` within a node raise ``ProcessExit`` there."""
        global _exit
        if not watched:
            _exit = os._exit
        watched.append(self)
        os._exit = _leave

    def _spawned(self) -> subprocess.Popen[bytes]:
        assert self.board.file is not None
        files = [self.board.file, self._command_end, self._signal_end, launcher.pipe()]
        arguments = [
            str(Path(__file__).parents[1]),
            str(self.pid),
            kin.started(self.pid),
            self.name,
            *map(str, files),
        ]
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CODE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,
            pass_fds=[file for file in files if file >= 0],
        )

    def _beat(self, child: subprocess.Popen[bytes]) -> None:
        """The thread: send heartbeats, and start the watchdog anew where it is killed."""
        for start in range(STARTS):
            if start:
                child = self._spawned()
                self._say(self._run_message + b"".join(map(_folder, self._folders)))
            assert child.stdout is not None
            with child.stdout:
                child.wait()  # it goes on as nobody's child
                self.process = int(child.stdout.readline() or 0)
                while not select.select([child.stdout], [], [], BEAT_SECONDS)[0]:
                    self.board.beat()
            if self._over.is_set():
                return

    def watch(self, folder: Path) -> None:
        """Tell the watchdog that a run begins in this folder."""
        self._run_message = _line(
            {"run": {"folder": str(folder), "path": str(folder.absolute()), "stacks": show_stacks()}}
        )
        self._say(self._run_message)

    def remove_in_the_end(self, folder: Path) -> None:
        """Remove a private folder however this process ends. Call this before the folder is made; a folder
        that is not there does no harm."""
        self._folders.append(folder)
        self._say(_folder(folder))

    def close(self) -> None:
        """End all processes that this one has started with its mark, remove private folders, and end the
        watchdog."""
        if self._thread is not None:
            self._over.set()
            self._say(_line({"end": True}))
            self._thread.join(CLOSE_SECONDS)
            # where it has been killed too often, or has not ended in time
            kin.end_all(lambda: kin.marked(self.name) + kin.of_ray(map(str, self._folders)))
            self._shut()
        while self._folders:
            private.remove(self._folders.pop())

    def _shut(self) -> None:
        if self in watched:
            watched.remove(self)
        if not watched:
            os._exit = _exit
        for file in (*self._files, *([] if self.board.file is None else [self.board.file])):
            os.close(file)
        self._files, self._thread, self.signals, self._commands, self.board = [], None, -1, -1, Board()

    def mark(self) -> None:
        """Mark processes that are started from now on as parts of the run."""
        os.environ[kin.MARK] = kin.marks(self.name, os.environ.get(kin.MARK, ""))

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """While inside, mark processes that are started as parts of the run."""
        self.mark()
        try:
            yield
        finally:
            outer_marks = kin.without(self.name, os.environ.get(kin.MARK, ""))
            if outer_marks:
                os.environ[kin.MARK] = outer_marks
            else:
                os.environ.pop(kin.MARK, None)

    def forked(self) -> None:
        """Called in a child that a stage has forked: tell the watchdog of the child, whose environment may
        lack the mark, and let signals of the terminal be handled by the run alone."""
        self._say(_line({"fork": os.getpid()}))
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    def _say(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._commands, line)


def for_worker() -> Watchdog:
    """The watchdog of a worker process. A worker with the mark of a run is ended by the watchdog of that run
    and needs none of its own."""
    if kin.MARK not in os.environ:
        dog = Watchdog.start()
        dog.mark()
        return dog
    dog = Watchdog()
    dog.refuse_exits()
    return dog


def _folder(path: Path) -> bytes:
    return _line({"folder": str(path)})


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


watched: list[Watchdog] = []  # watchdogs of this process
_exit = os._exit  # the function as it was before a watchdog replaced it


def _leave(status: int) -> NoReturn:
    """Stands in place of ``os._exit``: raises within a node of this process. A forked child may exit."""
    if any(dog.pid == os.getpid() and dog.board.inside for dog in watched):
        raise ProcessExit(f"os._exit({status})")
    _exit(status)


def _forked() -> None:
    for dog in watched:
        if dog.board.inside:
            dog.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
