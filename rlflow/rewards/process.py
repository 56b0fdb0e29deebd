"""One worker process, seen from its pool: messages with deadlines, the tail of what it prints, and a kill that takes its children."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from rlflow.deadline import LOOK, Deadline
from rlflow.errors import printable
from rlflow.rewards import frames
from rlflow.rewards.confinement import MARK, STRICT, Confinement
from rlflow.watchdog import kin

TAIL = 4096  # bytes kept of what a worker prints

Hear = Callable[[bytes], object]


class Died(Exception):
    """The process ended, or closed its end of the pipe."""


class RewardLate(Exception):
    """The process did not answer by the deadline."""


def in_worker() -> bool:
    """Whether this process is a reward worker: a user's file that starts a run when it is loaded must not start one there."""
    return MARK in os.environ


class WorkerProcess:
    """A running worker in a folder of its own, for built-in scorers or for users' rewards. The thread that starts it must live as long: on
    Linux the kernel ends it with that thread. ``hear`` is given what it prints."""

    def __init__(self, built_in: bool = False, confinement: Confinement = STRICT, hear: Hear = lambda data: None) -> None:
        self.built_in, self._hear = built_in, hear
        self._name = secrets.token_hex(8)  # in the mark of the process, and of all that it starts
        self._folder = _own_folder()
        replies, far_end = os.pipe()
        self._started: list[kin.Known] = []  # what it had started when it was killed
        command = [sys.executable, "-u", "-P", "-m", "rlflow.rewards.worker", str(os.getpid()), str(far_end),
                   confinement.words(built_in, self._folder)]  # fmt: skip
        try:
            self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
                                          pass_fds=(far_end,), start_new_session=True, cwd=self._folder,
                                          env=confinement.environment(built_in, self._folder, self._name))  # fmt: skip
        except BaseException:
            os.close(replies)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(far_end)
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self._requests, self._output, self._replies = self.child.stdin.fileno(), self.child.stdout.fileno(), replies
        self._reader, self._tail = frames.FrameReader(frames.LIMIT), b""
        self.loaded: set[str] = set()  # keys of the scorers that it holds
        self._number = secrets.randbits(32)  # of the last request; the first one is nobody's guess
        self._events = selectors.DefaultSelector()
        for descriptor in (self._requests, self._output, self._replies):
            os.set_blocking(descriptor, False)
        for descriptor in (self._output, self._replies):
            self._events.register(descriptor, selectors.EVENT_READ)

    def send(self, message: dict[str, Any], seconds: float) -> None:
        """A request. Raises Died or Late where the process does not take the whole message in time."""
        self._number += 1
        rest, until = memoryview(frames.packed({**message, "number": self._number})), Deadline(seconds)
        self._events.register(self._requests, selectors.EVENT_WRITE)
        try:
            while rest:
                self._wait(until)
                with contextlib.suppress(BlockingIOError):
                    rest = rest[os.write(self._requests, rest) :]
        except BrokenPipeError:
            raise Died(self._last_words()) from None
        finally:
            self._events.unregister(self._requests)

    def receive(self, seconds: float, place: int = frames.WHOLE) -> Any:
        """The reply to the last request, or to the row at a place of it. Raises Died or Late; user code that broke the stream, or replied
        in another's place, counts as dead."""
        until = Deadline(seconds)
        try:
            while (body := self._reader.next()) is None:
                self._wait(until)
            number, found, reply = frames.unpacked(body)
        except (ValueError, TypeError) as error:
            raise Died(f"the process sent what is no reply: {error}") from None
        if (number, found) != (self._number, place):
            raise Died("the process sent a reply to something else")
        return reply

    def _wait(self, until: Deadline) -> None:
        """Take in what the process sent and printed, waiting for something to happen. Looks once more after the deadline."""
        left = until.left()
        events = self._events.select(min(max(left, 0), LOOK))
        for key, _ in events:
            if key.fd != self._requests:
                self._take(key.fd)
        if not events and (left <= 0 or self.child.poll() is not None):
            raise RewardLate if left <= 0 else Died(self._last_words())

    def _take(self, descriptor: int) -> None:
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return
        if descriptor == self._output:
            self._tail = (self._tail + data)[-TAIL:]
            self._hear(data)
            if not data:
                self._events.unregister(descriptor)
        elif data:
            self._reader.feed(data)
        else:
            raise Died(self._last_words())

    def _last_words(self) -> str:
        """How it ended, and the end of what it printed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(0.5)
        code = self.child.returncode
        with contextlib.suppress(BlockingIOError, OSError):
            data = os.read(self._output, 1 << 16)
            self._tail = (self._tail + data)[-TAIL:]
            self._hear(data)
        how = "closed its pipe" if code is None else f"was killed by {_signal(-code)}" if code < 0 else f"exited with code {code}"
        printed = printable(self._tail.decode(errors="replace")).strip()
        return f"the process {how}" + (f"; it last printed: {printed[-500:]}" if printed else "")

    def signal_group(self) -> None:
        """Kill the process and those of its group; safe from any thread. What has left its group ends in ``kill``, which could no longer
        tell whose it was."""
        if self.child.returncode is None:
            self._started = kin.descendants(self.child.pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.child.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the process and those it started, in sessions of their own too, and wait until it is gone."""
        started = [*self._started, *(kin.descendants(self.child.pid) if self.child.returncode is None else [])]
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the group outlives its leader while it has members
            os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()
        kin.end_all(lambda: kin.marked(self._name) + kin.still(started))
        with contextlib.suppress(BlockingIOError, OSError):  # what it printed after its last reply
            self._hear(os.read(self._output, 1 << 16))
        self._events.close()
        os.close(self._replies)
        for stream in (self.child.stdin, self.child.stdout):
            assert stream is not None
            stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _own_folder() -> str:
    """Empty, and of this user alone. Where this process is killed, the run's watchdog removes it, by its name."""
    run = os.environ.get(kin.MARK, "").rpartition("/")[2]
    return tempfile.mkdtemp(prefix=f"rlflow-{run}-" if run else "rlflow-", suffix=".reward")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
