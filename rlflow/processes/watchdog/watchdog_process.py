"""The watchdog's own process. It checks the watched process four times a second.

- If C code holds the interpreter's lock, a run can't end itself. The watchdog kills it once a node or a call
  of a native library is past its deadline, or if the run was asked to stop.
- If the process vanishes, the watchdog reports this on the terminal and in status.json.
- When the process ends, however it ends, the watchdog ends all processes that the run started and removes the
  run's private folders.

``beside.py`` starts this file and sends it messages. It uses only the standard library, so that it starts
within milliseconds. Time doesn't count while the watched process is stopped (SIGSTOP, Ctrl-Z) or the watchdog
can't run.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import private, process_tag, stacks
from .heartbeat_page import HeartbeatPage, NodeUnderWay

TICK = 0.25  # seconds between two checks
# if there is no heartbeat for this long, C code is assumed to hold the interpreter's lock
SILENT_SECONDS = 1.5
GRACE_SECONDS = 1.5  # after a deadline, time for the run to end by itself if its interpreter works
ASKED_SECONDS = 5.0  # how long a run that was asked to stop may hold its interpreter's lock
AGAIN_SECONDS = 1.0  # the same time after a second request to stop
# Time for a killed process to disappear, and for its forked children to report to the watchdog.
GONE_SECONDS = 5.0
SHOWN = 4  # how many running nodes a message names
# part of the paths of the files that call nodes; a shown stack ends at such a file
RUNNER = "/rlflow/execution/"
STEP = re.compile(r"step-([0-9]{8,18})(?:-([0-9]{1,6}))?")
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that ask a run to stop
FAILED, REFUSED, INTERRUPTED = 1, 2, 130  # exit codes
# Signals raised by faults of the process itself.
CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


@dataclass(frozen=True)
class WatchedRun:
    """The run in the watched process."""

    folder: str  # the run's folder, as the user wrote it
    path: str  # the absolute path of the folder
    stacks: int  # the process's descriptor for its stacks; -1 for none


@dataclass(frozen=True)
class NativeCall:
    """A call of a native library that may hang before a run has started."""

    name: str  # name of the library in messages
    seconds: float  # its deadline
    late: str  # message that is printed if the process is killed after the deadline


@dataclass
class WatchdogProcess:
    """Watches a process: reads its messages and signals, and kills it and cleans up if necessary."""

    pid: int  # the watched process
    started: str  # start time of the watched process, as returned by `process_tag.started`
    name: str  # the process's name in the tag of the processes that it starts
    heartbeat_page: HeartbeatPage
    run: WatchedRun | None = None  # None before a run has begun
    call: NativeCall | None = None  # the current call, or None
    call_ran: float = 0.0  # seconds of the call during which the process could run
    ended: bool = False  # whether the process has reported its end
    folders: list[str] = field(default_factory=list)  # private folders, removed at the end
    forks: list[process_tag.Known] = field(default_factory=list)  # children that stages have forked
    # Reads the waiting messages; returns whether a process is left that may send more.
    listen: Callable[[], bool] = lambda: False
    silent: float = 0.0  # seconds without a heartbeat
    beats: int = -1  # heartbeats at the last check
    # Number of a running node → seconds it has been running, not counting time during which the process was
    # stopped.
    ran: dict[int, float] = field(default_factory=dict)
    stop_requests: list[float] = field(
        default_factory=list
    )  # for each request to stop, the seconds since then
    entries: list[NodeUnderWay] = field(default_factory=list)  # running nodes at the last check
    warned: bool = False  # whether the user was warned that the run will be killed

    # -- messages
    # --------------------------------------------------------------------------------------------------------

    def receive(self, message: dict[str, Any]) -> None:
        """Handle a message from the watched process.

        It reports the start of a run, a call of a native library, a private folder, a forked child, or the
        end of the process.
        """
        if "run" in message:
            self.run = WatchedRun(**message["run"]) if message["run"] else None
        elif "call" in message:
            self.call, self.call_ran = NativeCall(**message["call"]) if message["call"] else None, 0.0
        elif "folder" in message:
            self.folders.append(message["folder"])
        elif "fork" in message:
            start = process_tag.started(message["fork"])
            self.forks += [(message["fork"], start)] if start else []
        self.ended |= "end" in message

    def receive_signals(self, numbers: bytes) -> None:
        """Handle the numbers of signals that the watched process received.

        Only the first request to stop and later Ctrl-Cs count. Two at almost the same time count as one,
        because a single Ctrl-C can arrive in two ways.
        """
        for number in numbers:
            again = number == signal.SIGINT and self.stop_requests and self.stop_requests[-1] > 2 * TICK
            if again or (number in STOPPING and not self.stop_requests):
                self.stop_requests.append(0.0)

    # -- judgement
    # --------------------------------------------------------------------------------------------------------

    def check(self, state: str, elapsed: float) -> tuple[int, str] | None:
        """Return (exit code, reason) if the run must be ended, else None.

        ``state``: the kernel's state of the process. ``elapsed``: seconds since the last check.
        """
        elapsed = 0.0 if state in "Tt" else min(elapsed, 2 * TICK)
        beats = self.heartbeat_page.beats
        self.silent = 0.0 if beats != self.beats else self.silent + elapsed
        self.beats, self.entries = beats, self.heartbeat_page.entries()
        self.ran = {entry.number: self.ran.get(entry.number, 0.0) + elapsed for entry in self.entries}
        self.call_ran += elapsed
        self.stop_requests = [seconds + elapsed for seconds in self.stop_requests]
        if self.silent < SILENT_SECONDS or not (self.entries or self.call):
            return None
        return self._past_deadline() or self._unresponsive()

    def _past_deadline(self) -> tuple[int, str] | None:
        if self.call is not None and self.call_ran > self.call.seconds + GRACE_SECONDS:
            return REFUSED, self.call.late
        late = next(
            (entry for entry in self.entries if self.ran[entry.number] > entry.seconds + GRACE_SECONDS), None
        )
        if late is None:
            return None
        return FAILED, (
            f"stage '{late.name}' failed in iteration {late.iteration}: no result after its deadline of "
            f"{late.seconds:g} s, and its code holds the interpreter's lock: the run's process was killed"
        )

    def _unresponsive(self) -> tuple[int, str] | None:
        waits = [min(seconds, self.silent) for seconds in self.stop_requests]
        if (waits and waits[0] > ASKED_SECONDS) or (len(waits) > 1 and waits[1] > AGAIN_SECONDS):
            return (
                INTERRUPTED,
                f"stopped: {self._holder()} held the interpreter's lock for {self.silent:.0f} s",
            )
        if waits and not self.warned:
            self.warned = True
            say(
                f"stopping: {self._holder()} holds the interpreter's lock; if it does not release it "
                f"within {ASKED_SECONDS - waits[0]:.0f} s the run is killed"
                f"{' and its last checkpoint counts' if self.call is None else ''}"
            )
        return None

    def _holder(self) -> str:
        return _named(self.entries[0]) if self.call is None else self.call.name

    # -- action
    # --------------------------------------------------------------------------------------------------------

    def stop(self, code: int, why: str) -> None:
        """Kill the watched process and all processes of the run, and report why."""
        frames = self._stacks()
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGKILL)
        limit = time.monotonic() + GONE_SECONDS
        while process_tag.lives(self.pid, self.started) and time.monotonic() < limit:
            time.sleep(0.02)
        self.clear()
        self._report("failed" if code == FAILED else "interrupted", "\n".join(filter(None, [why, frames])))

    def vanished(self, status: process_tag.Stat | None) -> None:
        """Clean up after a process that was killed or called ``os._exit``, and report how it ended.

        ``status``: what the kernel says about the process, or None if it is gone.
        """
        self.clear()
        self.entries = self.heartbeat_page.entries()
        if self.run is None or not self._status():
            return
        code = os.waitstatus_to_exitcode(status.status) if status is not None else None
        if code is not None and (code >= 0 or -code in CRASHES):
            ending = f"exited with code {code}" if code >= 0 else f"crashed with {_signal_name(-code)}"
            self._report("failed", f"the run's process {ending}{self._nodes_under_way()}")
        else:  # readers of status.json notice by the pid that the process is gone
            ending = (
                f"was killed by {_signal_name(-code)}" if code is not None else "has ended without a report"
            )
            say(f"the run's process {ending}{self._nodes_under_way()}\n{self._advice()}")

    def clear(self) -> list[int]:
        """End the processes that the run started, and remove its private folders.

        Returns the pids of processes that couldn't be ended.
        """
        left = self._end_all()
        # A child that was forked while its parent vanished may not have sent its message yet.
        limit = time.monotonic() + GONE_SECONDS
        while not process_tag.lives(self.pid, self.started) and self.listen() and time.monotonic() < limit:
            left = self._end_all()
            time.sleep(process_tag.PAUSE)
        for folder in self.folders:
            private.remove(folder)
        # The private folders of reward processes.
        for path in glob.glob(f"{glob.escape(tempfile.gettempdir())}/rlflow-{self.name}-*.reward"):
            shutil.rmtree(path, ignore_errors=True)
        return left

    def _end_all(self) -> list[int]:
        return process_tag.end_all(
            lambda: (
                process_tag.marked(self.name)
                + process_tag.of_ray(self.folders)
                + process_tag.still(self.forks)
            )
        )

    def _signal(self, number: int) -> None:
        if process_tag.lives(self.pid, self.started):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)

    def _stacks(self) -> str:
        if self.run is None or self.run.stacks < 0 or not process_tag.lives(self.pid, self.started):
            return ""
        dump = stacks.written(self.pid, self.run.stacks)
        return stacks.shown(dump, lambda path, name: RUNNER in path)

    def _nodes_under_way(self) -> str:
        return f" while {', '.join(map(_named, self.entries[:SHOWN]))} ran" if self.entries else ""

    # -- the report
    # --------------------------------------------------------------------------------------------------------

    def _report(self, state: str, why: str) -> None:
        if self.run is None:  # before a run has begun, there is nothing to resume
            return say(why)
        advice = self._advice()
        self._write_status(state, f"{why}\n{advice}")
        say(f"{why}\n{advice}")

    def _advice(self) -> str:
        """Return a sentence that names the run's last checkpoint and the command to continue."""
        assert self.run is not None
        checkpoints = []
        with contextlib.suppress(OSError):
            folder = os.path.join(self.run.path, "checkpoints")
            steps = [step for name in os.listdir(folder) if (step := STEP.fullmatch(name)) is not None]
            checkpoints = [
                step for step in steps if os.path.isfile(os.path.join(folder, step[0], "manifest.json"))
            ]
        if not checkpoints:
            return "no checkpoint was saved: start the run again"
        newest = max(checkpoints, key=lambda step: (int(step[1]), int(step[2] or 1)))
        return f"saved as {newest[0]}; continue with: rlflow resume {self.run.folder}"

    def _status(self) -> dict[str, Any]:
        """Return status.json if it is about this process and a run that is going, else {}."""
        assert self.run is not None
        try:
            with open(os.path.join(self.run.path, "status.json")) as file:
                status = json.load(file)
            return status if status["state"] == "running" and status["process"]["pid"] == self.pid else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def _write_status(self, state: str, error: str) -> None:
        status = self._status()
        if not status or self.run is None:
            return
        finished = max(status.get("iteration", 0), *(entry.iteration for entry in self.entries), 0)
        aside = os.path.join(self.run.path, f".status.json.{os.getpid()}")
        try:
            with open(aside, "w") as file:
                file.write(
                    json.dumps(
                        {
                            **status,
                            "state": state,
                            "error": error,
                            "updated": time.time(),
                            "iteration": finished,
                        }
                    )
                    + "\n"
                )
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, os.path.join(self.run.path, "status.json"))
        except OSError as raised:
            say(f"the state of the run cannot be written to {self.run.folder}: {raised.strerror}")


def _named(entry: NodeUnderWay) -> str:
    return f"stage '{entry.name}' of iteration {entry.iteration}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def say(text: str) -> None:
    """Write to the run's terminal, and show the cursor, which a live view may have hidden.

    Errors are ignored, because the terminal may be closed.
    """
    with contextlib.suppress(OSError):
        cursor = "\x1b[?25h\n" if os.isatty(2) else ""
        os.write(2, f"{cursor}{text}\n".encode(errors="backslashreplace"))


# -- the process
# ------------------------------------------------------------------------------------------------------------


def watch(watchdog_process: WatchdogProcess, commands: int, signals: int) -> int | None:
    """Watch a process until it ends or reports that it is about to end.

    Returns the exit code if the watchdog ended the run, else None. ``commands`` and ``signals``: the file
    descriptors for the process's messages and for the numbers of its signals.
    """
    poll, last = select.poll(), time.monotonic()
    for file in (commands, signals):
        os.set_blocking(file, False)
        poll.register(file, select.POLLIN)
    watchdog_process.listen = Messages(watchdog_process, commands, poll).listen
    while True:
        poll.poll(TICK * 1000)
        watchdog_process.listen()
        watchdog_process.receive_signals(_read(signals, poll) or b"")
        if watchdog_process.ended:
            watchdog_process.clear()
            return None
        status, now = process_tag.stat(watchdog_process.pid), time.monotonic()
        if status is None or status.state in "ZX" or status.started != watchdog_process.started:
            watchdog_process.vanished(
                status if status is not None and status.started == watchdog_process.started else None
            )
            watchdog_process.receive_signals(_read(signals, poll) or b"")
            if watchdog_process.call is None or not watchdog_process.stop_requests:
                return None
            # A signal handler of the library ended the process.
            say("stopped before the run began")
            return INTERRUPTED
        if (verdict := watchdog_process.check(status.state, now - last)) is not None:
            watchdog_process.stop(*verdict)
            return verdict[0]
        last = now


class Messages:
    """Messages to the watchdog: lines of JSON from a pipe."""

    def __init__(self, watchdog_process: WatchdogProcess, file: int, poll: select.poll) -> None:
        self.watchdog_process, self.file, self.poll, self.torn = watchdog_process, file, poll, b""

    def listen(self) -> bool:
        """Handle all messages waiting in the pipe.

        Returns whether the pipe is still open in the watched process or in a child that it forked.
        """
        while data := _read(self.file, self.poll):
            *lines, self.torn = (self.torn + data).split(b"\n")
            for line in lines:
                with contextlib.suppress(ValueError):
                    self.watchdog_process.receive(json.loads(line))
        return data is None


def _read(file: int, poll: select.poll) -> bytes | None:
    """Return the bytes that can be read now, or None if there aren't any yet.

    If the other end of the pipe is closed, returns b"" and removes the pipe from ``poll``.
    """
    try:
        data = os.read(file, 1 << 16)
    except BlockingIOError:
        return None
    if not data:
        with contextlib.suppress(KeyError):
            poll.unregister(file)
    return data


def main() -> None:
    """Run the watchdog process.

    Its arguments are the pid and start time of the watched process, the process's name in the process tag,
    and the file descriptors of the heartbeat page, of messages, of signals, and of the launcher's pipe (-1
    for none). Standard output is closed when the watchdog ends.
    """
    if os.fork():  # fork, because a child of the run could be ended together with the run's other children
        os._exit(0)
    os.chdir("/")
    for number in (*STOPPING, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.write(1, f"{os.getpid()}\n".encode())
    pid, start, name, *files = sys.argv[-7:]
    heartbeat_page, commands, signals, launcher = map(int, files)
    code = watch(WatchdogProcess(int(pid), start, name, HeartbeatPage(heartbeat_page)), commands, signals)
    if code is not None and launcher >= 0:
        with contextlib.suppress(OSError):
            os.write(launcher, b"v" + bytes([code]))
