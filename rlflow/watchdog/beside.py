"""The watchdog as the process has it that it watches: how it is started, and what it is told."""

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

from rlflow.watchdog import kin, launcher, private
from rlflow.watchdog.board import Board
from rlflow.watchdog.stacks import show_stacks

BEAT_SECONDS = 0.25  # between two signs that the interpreter lets its threads run
CLOSE_SECONDS = 10.0  # that it may take to end what a run has started
STARTS = 3  # of the watchdog, which may be killed itself
CODE = "import sys; sys.path.append(sys.argv[1]); from watchdog.dog import main; main()"  # of this package, but of no other of ours

class ProcessExit(BaseException):
    """A stage called ``os._exit``. No Exception: what a stage does about errors of its own is not meant for this."""


class Watchdog:
    """``name``: of what is started here, in the mark of processes, and in names of private folders. ``board``: where nodes under way are
    written down. ``signals``: a descriptor that takes the number of each signal, -1 where nothing is watched, as on systems that are not
    Linux."""

    def __init__(self) -> None:
        self.name, self.pid, self.board, self.signals = secrets.token_hex(8), os.getpid(), Board(), -1
        self.process: int | None = None  # of the watchdog, once it has said so
        self._over, self._told = threading.Event(), b""
        self._folders: list[Path] = []
        self._files: list[int] = []
        self._commands = -1
        self._thread: threading.Thread | None = None

    @classmethod
    def start(cls) -> Watchdog:
        """One for this process. Where there is no room for it, of processes or memory, a run goes on without."""
        dog = cls()
        if sys.platform == "linux":
            try:
                dog._open()
            except (OSError, RuntimeError):  # RuntimeError: no thread can be started
                dog._shut()
        return dog

    def _open(self) -> None:
        self.board = Board.new()
        (self._heard, self._commands), (self._seen, self.signals) = os.pipe(), os.pipe()
        self._files = [self._heard, self._commands, self._seen, self.signals]
        for file in (self._commands, self.signals):
            os.set_blocking(file, False)
        self._thread = threading.Thread(target=self._beat, args=(self._spawned(),), name="watchdog", daemon=True)
        self._thread.start()
        self.refuse_exits()

    def refuse_exits(self) -> None:
        """From now on ``os._exit`` within a node is the node's failure."""
        global _exit
        if not watched:
            _exit = os._exit
        watched.append(self)
        os._exit = _leave

    def _spawned(self) -> subprocess.Popen[bytes]:
        assert self.board.file is not None
        files = [self.board.file, self._heard, self._seen, launcher.pipe()]
        told = [str(Path(__file__).parents[1]), str(self.pid), kin.started(self.pid), self.name, *map(str, files)]
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", CODE, *told], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                start_new_session=True, bufsize=0, pass_fds=[file for file in files if file >= 0])  # fmt: skip

    def _beat(self, child: subprocess.Popen[bytes]) -> None:
        """In a thread: say that threads run, and start the watchdog anew where it is killed."""
        for start in range(STARTS):
            if start:
                child = self._spawned()
                self._say(self._told + b"".join(map(_folder, self._folders)))
            assert child.stdout is not None
            with child.stdout:
                child.wait()  # it goes on as nobody's child
                self.process = int(child.stdout.readline() or 0)
                while not select.select([child.stdout], [], [], BEAT_SECONDS)[0]:
                    self.board.beat()
            if self._over.is_set():
                return

    def watch(self, folder: Path) -> None:
        """A run begins, in this folder."""
        self._told = _line({"run": {"folder": str(folder), "path": str(folder.absolute()), "stacks": show_stacks()}})
        self._say(self._told)

    def remove_in_the_end(self, folder: Path) -> None:
        """A private folder, however this process ends. To be told before the folder is made: what is not there need not go."""
        self._folders.append(folder)
        self._say(_folder(folder))

    def close(self) -> None:
        """End what was started here, and watch no more."""
        if self._thread is not None:
            self._over.set()
            self._say(_line({"end": True}))
            self._thread.join(CLOSE_SECONDS)
            kin.end_all(lambda: kin.marked(self.name))  # where it has been killed too often, or has not ended in time
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
        """Processes that are started from now on are of the run."""
        os.environ[kin.MARK] = kin.marks(self.name, os.environ.get(kin.MARK, ""))

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """The same while inside."""
        self.mark()
        try:
            yield
        finally:
            rest = kin.without(self.name, os.environ.get(kin.MARK, ""))
            if rest:
                os.environ[kin.MARK] = rest
            else:
                os.environ.pop(kin.MARK, None)

    def forked(self) -> None:
        """In a child that was forked by a stage. Its environment need not tell whose it is, so it says so itself; and what a terminal
        asks of the run is the run's affair."""
        self._say(_line({"fork": os.getpid()}))
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    def _say(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._commands, line)


def for_worker() -> Watchdog:
    """That of a process that works for another: where the one that watches the run sees it too, by its mark, none of its own."""
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


watched: list[Watchdog] = []  # of this process
_exit = os._exit  # as it was before one of these watched


def _leave(status: int) -> NoReturn:
    """In place of ``os._exit``: what a stage calls is its failure. A child that was forked may end as it likes."""
    if any(dog.pid == os.getpid() and dog.board.inside for dog in watched):
        raise ProcessExit(f"os._exit({status})")
    _exit(status)


def _forked() -> None:
    for dog in watched:
        if dog.board.inside:
            dog.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
