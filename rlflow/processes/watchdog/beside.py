"""The watched process's side of the watchdog: start the watchdog process and send it messages."""

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

from rlflow.processes.watchdog import launcher, private, process_tag
from rlflow.processes.watchdog.heartbeat_page import HeartbeatPage
from rlflow.processes.watchdog.signals import signals_to
from rlflow.processes.watchdog.stacks import show_stacks

BEAT_SECONDS = 0.25  # seconds between two heartbeats, which show that the interpreter's threads can run
CLOSE_SECONDS = 10.0  # time for the watchdog to end the processes of a run
STARTS = 3  # how often the watchdog is started, since it can be killed too
# The watchdog imports this package, but no other package of rlflow.
CODE = "import sys; sys.path.append(sys.argv[1]); from watchdog.watchdog_process import main; main()"


class ProcessExit(BaseException):
    """A stage called ``os._exit``.

    This isn't an Exception, so handlers in the stage don't catch it.
    """


class Watchdog:
    """The handle by which a process uses its watchdog.

    It only works on Linux. On other systems, nothing is watched.
    """

    def __init__(self) -> None:
        # Name in the process tag of started processes, and in the names of private folders.
        self.name = secrets.token_hex(8)
        self.pid = os.getpid()
        self.heartbeat_page = HeartbeatPage()  # the heartbeat page, with the running nodes
        self.signals = -1  # descriptor that receives the number of each signal; -1 without a watchdog
        self.process: int | None = None  # pid of the watchdog, once it has reported it
        self._over, self._run_message, self._call_message = threading.Event(), b"", b""
        self._folders: list[Path] = []
        self._files: list[int] = []
        self._commands = -1
        self._thread: threading.Thread | None = None

    @classmethod
    def start(cls) -> Watchdog:
        """Start a watchdog process for this process, and return its handle.

        If there is no process, thread or memory left for it, the run goes on without a watchdog.
        """
        watchdog_process = cls()
        if sys.platform == "linux":
            try:
                watchdog_process._open()
            except (OSError, RuntimeError):  # a RuntimeError means that the thread cannot be started
                watchdog_process._shut()
        return watchdog_process

    def _open(self) -> None:
        self.heartbeat_page = HeartbeatPage.new()
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
        """From now on, make ``os._exit`` raise ``ProcessExit`` if a node calls it."""
        global _exit
        if not watched:
            _exit = os._exit
        watched.append(self)
        os._exit = _leave

    def _spawned(self) -> subprocess.Popen[bytes]:
        assert self.heartbeat_page.file is not None
        files = [self.heartbeat_page.file, self._command_end, self._signal_end, launcher.pipe()]
        arguments = [
            str(Path(__file__).parents[1]),
            str(self.pid),
            process_tag.started(self.pid),
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
        """Send heartbeats, and restart the watchdog process if it is killed. Runs in a thread.

        ``child``: the current watchdog process.
        """
        for start in range(STARTS):
            if start:
                child = self._spawned()
                self._send(self._run_message + self._call_message + b"".join(map(_folder, self._folders)))
            assert child.stdout is not None
            with child.stdout:
                child.wait()  # this child forks the watchdog proper, which continues in the background
                self.process = int(child.stdout.readline() or 0)
                while not select.select([child.stdout], [], [], BEAT_SECONDS)[0]:
                    self.heartbeat_page.beat()
            if self._over.is_set():
                return

    def watch(self, folder: Path) -> None:
        """Tell the watchdog process that a run starts in this folder."""
        self._run_message = _line(
            {"run": {"folder": str(folder), "path": str(folder.absolute()), "stacks": show_stacks()}}
        )
        self._send(self._run_message)

    @contextlib.contextmanager
    def during_call(self, name: str, seconds: float, late: str) -> Iterator[None]:
        """Guard a call of a native library that may hold the interpreter's lock.

        If it still holds the lock after ``seconds``, the watchdog kills this process, prints ``late`` and
        sets exit code 2. If a signal asks to stop in the meantime, the watchdog kills the process soon after.
        ``name``: the library's name in messages.
        """
        self._call_message = _line({"call": {"name": name, "seconds": seconds, "late": late}})
        self._send(self._call_message)
        try:
            with signals_to(self.signals):
                yield
        finally:
            self._call_message = b""
            self._send(_line({"call": None}))

    def remove_in_the_end(self, folder: Path) -> None:
        """Have the watchdog remove a private folder when this process ends, however it ends.

        Call this before you create the folder; a missing folder does no harm.
        """
        self._folders.append(folder)
        self._send(_folder(folder))

    def close(self) -> None:
        """End all processes with this process's tag, remove private folders, and end the watchdog."""
        if self._thread is not None:
            self._over.set()
            self._send(_line({"end": True}))
            self._thread.join(CLOSE_SECONDS)
            # Needed if the watchdog was killed too often, or has not ended in time.
            process_tag.end_all(
                lambda: process_tag.marked(self.name) + process_tag.of_ray(map(str, self._folders))
            )
            self._shut()
        while self._folders:
            private.remove(self._folders.pop())

    def _shut(self) -> None:
        if self in watched:
            watched.remove(self)
        if not watched:
            os._exit = _exit
        for file in (*self._files, *([] if self.heartbeat_page.file is None else [self.heartbeat_page.file])):
            os.close(file)
        self._files, self._thread, self.signals, self._commands, self.heartbeat_page = (
            [],
            None,
            -1,
            -1,
            HeartbeatPage(),
        )

    def mark(self) -> None:
        """Set the run's process tag for all processes that this process starts from now on."""
        os.environ[process_tag.MARK] = process_tag.marks(self.name, os.environ.get(process_tag.MARK, ""))

    @contextlib.contextmanager
    def marking(self) -> Iterator[None]:
        """Give the run's process tag to processes that are started inside the context."""
        self.mark()
        try:
            yield
        finally:
            outer_marks = process_tag.without(self.name, os.environ.get(process_tag.MARK, ""))
            if outer_marks:
                os.environ[process_tag.MARK] = outer_marks
            else:
                os.environ.pop(process_tag.MARK, None)

    def forked(self) -> None:
        """Prepare a child process that a stage forked. Called in the child.

        The watchdog is told about the child, which may not have the process tag in its environment. The child
        ignores Ctrl-C and ends at the other signals that ask a run to stop.
        """
        self._send(_line({"fork": os.getpid()}))
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)

    def _send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):
            os.write(self._commands, line)


def for_worker() -> Watchdog:
    """Return the watchdog of a worker process.

    If the worker has a run's process tag, that run's watchdog will end it, so it gets a handle without a
    process.
    """
    if process_tag.MARK not in os.environ:
        watchdog_process = Watchdog.start()
        watchdog_process.mark()
        return watchdog_process
    watchdog_process = Watchdog()
    watchdog_process.refuse_exits()
    return watchdog_process


def _folder(path: Path) -> bytes:
    return _line({"folder": str(path)})


def _line(message: object) -> bytes:
    return json.dumps(message).encode() + b"\n"


def during_call(name: str, seconds: float, late: str) -> contextlib.AbstractContextManager[None]:
    """Guard a call with this process's watchdog, as in ``Watchdog.during_call``.

    Has no effect if there is no watchdog.
    """
    return watched[-1].during_call(name, seconds, late) if watched else contextlib.nullcontext()


watched: list[Watchdog] = []  # active watchdogs of this process
_exit = os._exit  # the original function, before a watchdog replaced it


def _leave(status: int) -> NoReturn:
    """Stand in for ``os._exit``: raise ProcessExit if a node of this process calls it, otherwise exit.

    Forked children always exit.
    """
    if any(
        watchdog_process.pid == os.getpid() and watchdog_process.heartbeat_page.inside
        for watchdog_process in watched
    ):
        raise ProcessExit(f"os._exit({status})")
    _exit(status)


def _forked() -> None:
    for watchdog_process in watched:
        if watchdog_process.heartbeat_page.inside:
            watchdog_process.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
