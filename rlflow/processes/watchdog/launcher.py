"""The launcher, a run's parent process, which returns the right exit code to the shell.

A run that is killed because its interpreter hangs has no exit code of its own, and if C code ends a run with
code 0, that code is wrong. The command that starts a run therefore forks before it loads anything. The child
executes the run, while the parent forwards signals and waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time

from rlflow.processes.watchdog import process_tag

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HEAVY = "torch"  # once this module is loaded, the process has threads, which a forked child would not have
CLOSE_SECONDS = 15.0  # after the run has ended, time for the watchdog to end the remaining processes
SEEN_SECONDS = 0.2  # time for the run to report that it has received a Ctrl-C itself
VANISHED = 1  # exit code of the launcher if a run exits with 0 without having reported its end
# Kinds of messages: a SIGINT was received; the code of a run that exits; the code for a run that was killed.
SEEN, DONE, VERDICT = b"i", b"d", b"v"

_pipe: int | None = None  # in the process that runs: the writing end of the pipe
_at_once = False


def pipe() -> int:
    """Return the file descriptor of the pipe to the launcher, or -1 if there is no launcher."""
    return -1 if _pipe is None else _pipe


def leave_at_once() -> None:
    """Make this process exit without running the exit handlers of libraries.

    They would wait for processes that are already gone.
    """
    global _at_once
    _at_once = True


def leaves_at_once() -> bool:
    """Whether ``leave_at_once`` has been called."""
    return _at_once


def seen(number: int) -> None:
    """Tell the launcher that the run itself received the signal ``number``."""
    if number == signal.SIGINT:
        _report(SEEN)


def done(code: int) -> None:
    """Tell the launcher that the run is about to exit with this code."""
    _report(DONE, code)


def _report(kind: bytes, value: int = 0) -> None:
    if _pipe is not None:
        with contextlib.suppress(OSError):
            os.write(_pipe, kind + bytes([value]))


def apart() -> int | None:
    """Fork this process: the child carries on with the command, and the parent becomes its launcher.

    Returns None in the child. In the launcher, returns the child's exit code once it has ended. If the
    process already has threads or this isn't Linux, it returns None without forking.
    """
    global _pipe
    if sys.platform != "linux" or HEAVY in sys.modules or threading.active_count() > 1:
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    reading, writing = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:
        child = -1
    if child > 0:
        os.close(writing)
        return Launcher(child, reading).wait()
    os.close(reading)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if child == 0:
        process_tag.die_with(parent)
        _pipe = writing
    return None


class Launcher:
    """Waits for the child process that executes the run.

    ``pipe_end``: the file descriptor that the child's messages come from.
    """

    def __init__(self, child: int, pipe_end: int) -> None:
        self.child, self._pipe_end = child, pipe_end
        self._messages: list[tuple[bytes, int]] = []
        # Signals that this process ignores, as under nohup, are not passed on.
        self._passed_on = [
            number
            for number in PASSED_ON
            if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN
        ]
        process_tag.adopt()

    def wait(self) -> int:
        """Wait until the child has ended, and return its exit code.

        If a signal killed the child, this process kills itself with the same signal.
        """
        while not self._ended():
            info = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
            if info.si_signo in self._passed_on and not self._received_too(info):
                os.kill(self.child, info.si_signo)
        self._read_to_the_end()
        status = os.waitpid(self.child, 0)[1]
        process_tag.end_all(
            lambda: [
                pid
                for pid in process_tag.still(process_tag.descendants(os.getpid()))
                if not process_tag.left_alone(pid)
            ]
        )
        return self._code(status)

    def _ended(self) -> bool:
        """Whether the child has ended. It isn't reaped yet, so that the watchdog can examine it.

        Other processes that have ended are reaped. This process has adopted them from parents that ended
        before them.
        """
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if info.si_pid == self.child:
                return True
            os.waitpid(info.si_pid, 0)
        return False

    def _received_too(self, info: signal.struct_siginfo) -> bool:
        """Whether the child got this signal too, in which case it must not be forwarded.

        A terminal sends Ctrl-C to both processes, and other programs may signal both. Only Ctrl-C needs this
        check, because a second one does more than the first.
        """
        if info.si_signo != signal.SIGINT:
            return False
        limit = time.monotonic() + SEEN_SECONDS
        while (SEEN, 0) not in self._messages and time.monotonic() < limit:
            self._read(limit - time.monotonic())
        if reported := (SEEN, 0) in self._messages:
            self._messages.remove((SEEN, 0))
        return reported or info.si_code > 0  # the kernel sends it to both processes

    def _read(self, seconds: float) -> bool:
        """Read the messages that arrive within ``seconds``. Returns whether there may be more."""
        if not select.select([self._pipe_end], [], [], max(seconds, 0.0))[0]:
            return True
        data = os.read(self._pipe_end, 1 << 10)  # a pipe delivers each write as a unit
        self._messages += [(data[i : i + 1], data[i + 1]) for i in range(0, len(data) - 1, 2)]
        return bool(data)

    def _read_to_the_end(self) -> None:
        """Read messages until the child and the watchdog close the pipe, for at most CLOSE_SECONDS.

        The limit is there because a forked process could keep the pipe open.
        """
        limit = time.monotonic() + CLOSE_SECONDS
        while self._read(limit - time.monotonic()) and time.monotonic() < limit:
            pass

    def _code(self, status: int) -> int:
        code, messages = os.waitstatus_to_exitcode(status), dict(self._messages)
        if VERDICT in messages:
            return messages[VERDICT]
        if code >= 0:
            return code if code or DONE in messages else VANISHED
        _die_by(-code)
        return 128 - code


def _die_by(number: int) -> None:
    """Kill this process with the signal that killed the run, so that the shell sees that signal."""
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
