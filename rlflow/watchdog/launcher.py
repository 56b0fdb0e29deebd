"""The process that a shell waits for, above the one that runs: it tells the shell how the run ended where that one cannot.

A process that is killed, since its interpreter hangs, has no exit code of its own; one that C code ends with code 0 has a wrong one. So the
command that starts a run forks before anything is loaded: the child runs, the parent passes signals on and waits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time

from rlflow.watchdog import kin

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HEAVY = "torch"  # once this is loaded there are threads, which no child would have
CLOSE_SECONDS = 15.0  # that the watchdog may take, once the run has ended, to end what is left of it
SEEN_SECONDS = 0.2  # in which the run says that it has had a ctrl-C itself
VANISHED = 1  # exit code for a process that ended with 0 and did not say that it was done
SEEN, DONE, VERDICT = b"i", b"d", b"v"  # through the pipe: a SIGINT has been had; a code, at the exit; a code, of what was killed

_pipe: int | None = None  # in the process that runs
_at_once = False


def pipe() -> int:
    """The descriptor by which the launcher is told; -1 where there is none."""
    return -1 if _pipe is None else _pipe


def leave_at_once() -> None:
    """Have this process end without what libraries do at its end: they would wait for who is gone."""
    global _at_once
    _at_once = True


def leaves_at_once() -> bool:
    return _at_once


def seen(number: int) -> None:
    """The run has had a signal."""
    if number == signal.SIGINT:
        _tell(SEEN)


def done(code: int) -> None:
    """The run is about to exit with a code."""
    _tell(DONE, code)


def _tell(kind: bytes, value: int = 0) -> None:
    if _pipe is not None:
        with contextlib.suppress(OSError):
            os.write(_pipe, kind + bytes([value]))


def apart() -> int | None:
    """Go on in a child of this process. None in the child; here, once it has ended, the exit code. None, too, where all stays in one
    process, since that has threads already or the system is not Linux."""
    global _pipe
    if sys.platform != "linux" or HEAVY in sys.modules or threading.active_count() > 1:
        return None
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told, tells = os.pipe()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    parent = os.getpid()
    try:
        child = os.fork()
    except OSError:
        child = -1
    if child > 0:
        os.close(tells)
        return Launcher(child, told).wait()
    os.close(told)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if child == 0:
        kin.die_with(parent)
        _pipe = tells
    return None


class Launcher:
    """Waits for the child that runs."""

    def __init__(self, child: int, told: int) -> None:
        self.child, self._told = child, told
        self._heard: list[tuple[bytes, int]] = []
        self._passed_on = [number for number in PASSED_ON if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]  # nohup
        kin.adopt()

    def wait(self) -> int:
        """The exit code; where the child was killed by a signal, this process ends by it too."""
        while not self._ended():
            info = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
            if info.si_signo in self._passed_on and not self._has_had(info):
                os.kill(self.child, info.si_signo)
        self._hear_the_end()
        status = os.waitpid(self.child, 0)[1]
        kin.end_all(lambda: [pid for pid in kin.still(kin.descendants(os.getpid())) if not kin.left_alone(pid)])
        return self._code(status)

    def _ended(self) -> bool:
        """Whether the child has; others, whose parents have ended, are seen off. It stays to be looked at until the watchdog is done."""
        while (info := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if info.si_pid == self.child:
                return True
            os.waitpid(info.si_pid, 0)
        return False

    def _has_had(self, info: signal.struct_siginfo) -> bool:
        """Whether the child has had this signal too: what a terminal sends goes to both, and so may what a process sends. A second ctrl-C
        means more than one, other signals do not."""
        if info.si_signo != signal.SIGINT:
            return False
        limit = time.monotonic() + SEEN_SECONDS
        while (SEEN, 0) not in self._heard and time.monotonic() < limit:
            self._hear(limit - time.monotonic())
        if seen := (SEEN, 0) in self._heard:
            self._heard.remove((SEEN, 0))
        return seen or info.si_code > 0  # of the kernel, which sends it to both

    def _hear(self, seconds: float) -> bool:
        """Whether more may come through the pipe; what comes within so many seconds is taken in."""
        if not select.select([self._told], [], [], max(seconds, 0.0))[0]:
            return True
        data = os.read(self._told, 1 << 10)  # what is written at once comes at once
        self._heard += [(data[i : i + 1], data[i + 1]) for i in range(0, len(data) - 1, 2)]
        return bool(data)

    def _hear_the_end(self) -> None:
        """Until the child and the watchdog have closed the pipe, or what was forked keeps it open for too long."""
        limit = time.monotonic() + CLOSE_SECONDS
        while self._hear(limit - time.monotonic()) and time.monotonic() < limit:
            pass

    def _code(self, status: int) -> int:
        code, said = os.waitstatus_to_exitcode(status), dict(self._heard)
        if VERDICT in said:
            return said[VERDICT]
        if code >= 0:
            return code if code or DONE in said else VANISHED
        _die_by(-code)
        return 128 - code


def _die_by(number: int) -> None:
    """As a shell expects it of who was killed."""
    with contextlib.suppress(OSError, ValueError):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
