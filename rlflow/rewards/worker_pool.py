"""Runs worker processes: sends requests with deadlines, reads output, kills and restarts processes.

Killing a process also kills its children.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import secrets
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from rlflow.errors import Place, PlanError, printable
from rlflow.processes.children import Child
from rlflow.processes.deadline import LOOK, Deadline
from rlflow.processes.watchdog import process_tag
from rlflow.rewards import frames
from rlflow.rewards.confinement import MARK, STRICT, Confinement

TAIL = 4096  # last bytes of a worker's output that are kept
START = 120.0  # seconds for a worker to start, load its object and take a request
GRACE = 1.0  # after a deadline, seconds until a process with concurrent requests is killed
TRIES = 3  # how many workers in a row may end while they load or before they take a request

OnOutput = Callable[[bytes], object]
Job = TypeVar("Job")


class Died(Exception):
    """The worker process ended, closed its end of the pipe, or sent an invalid reply."""


class RewardLate(Exception):
    """The worker process missed the deadline for its reply."""


class Idle(Exception):
    """A worker process ended before it took its request, so the request isn't to blame."""


def in_worker() -> bool:
    """True if this process is a worker of a pool.

    A user's file may start a run when it's loaded. Workers load it too, and must not start another run.
    """
    return MARK in os.environ


class WorkerProcess:
    """A running worker process with a private folder, for built-in scorers or for users' rewards.

    The thread that creates it must outlive the worker, because on Linux, the kernel kills the worker when
    that thread ends. ``on_output``: called with the worker's output.
    """

    def __init__(
        self,
        built_in: bool = False,
        confinement: Confinement = STRICT,
        on_output: OnOutput = lambda data: None,
        program: str = "rlflow.rewards.reward_worker",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the process.

        ``built_in``: True if it runs built-in scorers. ``confinement``: the permissions of users' code.
        ``on_output``: called with the process's output. ``program``: the module that the process runs.
        ``clock``: the clock for deadlines, in seconds.
        """
        self.built_in, self._hear, self._clock = built_in, on_output, clock
        self._folder, name = _own_folder(), secrets.token_hex(8)
        replies, far_end = os.pipe()
        command = [
            sys.executable,
            "-u",
            "-P",
            "-m",
            program,
            str(os.getpid()),
            str(far_end),
            confinement.words(built_in, self._folder),
        ]
        try:
            self.child = Child(
                command,
                name,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                bufsize=0,
                pass_fds=(far_end,),
                cwd=self._folder,
                env=confinement.environment(built_in, self._folder, name),
            )
        except BaseException:
            os.close(replies)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(far_end)
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self._requests = self.child.stdin.fileno()
        self._output = self.child.stdout.fileno()
        self._replies = replies
        self._reader, self._tail = frames.FrameReader(frames.LIMIT), b""
        self.loaded: set[str] = set()  # keys of the loaded objects
        # Number of the last request. It starts at a random value, so that user code cannot guess it.
        self._number = secrets.randbits(32)
        self._events = selectors.DefaultSelector()
        for descriptor in (self._requests, self._output, self._replies):
            os.set_blocking(descriptor, False)
        for descriptor in (self._output, self._replies):
            self._events.register(descriptor, selectors.EVENT_READ)

    def send(self, message: dict[str, Any], seconds: float) -> None:
        """Send a request.

        Raises Died if the process has ended, and RewardLate if it doesn't take the whole message within
        ``seconds``.
        """
        self._number += 1
        unsent, until = (
            memoryview(frames.packed({**message, "number": self._number})),
            Deadline(seconds, self._clock),
        )
        self._events.register(self._requests, selectors.EVENT_WRITE)
        try:
            while unsent:
                self._wait(until)
                with contextlib.suppress(BlockingIOError):
                    unsent = unsent[os.write(self._requests, unsent) :]
        except BrokenPipeError:
            raise Died(self._last_words()) from None
        finally:
            self._events.unregister(self._requests)

    def receive(self, seconds: float, place: int = frames.WHOLE) -> Any:
        """Return the next reply to the last request.

        ``place``: the index of the row that the reply must be for; by default, it must be for the whole
        request. Raises RewardLate after ``seconds``, and Died if the process has ended, or if the reply is
        invalid or for another row.
        """
        until = Deadline(seconds, self._clock)
        try:
            while (body := self._reader.next()) is None:
                self._wait(until)
            number, replied_place, reply = frames.unpacked(body)
            if self._output in self._events.get_map():
                # Read the output that was printed before the reply now, because it might not be read later.
                self._take(self._output)
        except (ValueError, TypeError) as error:
            raise Died(f"the process sent an invalid reply: {error}") from None
        if (number, replied_place) != (self._number, place):
            raise Died("the process sent a reply to another request or row")
        return reply

    def _wait(self, until: Deadline) -> None:
        """Wait for data from the process, and read it.

        After the deadline, reads what is already there, or raises RewardLate. Raises Died if the process has
        ended.
        """
        seconds = until.left()
        events = self._events.select(min(max(seconds, 0), LOOK))
        for key, _ in events:
            if key.fd != self._requests:
                self._take(key.fd)
        if not events and (seconds <= 0 or self.child.poll() is not None):
            raise RewardLate if seconds <= 0 else Died(self._last_words())

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
        """Say how the process ended, with the last part of its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.child.wait(0.5)
        code = self.child.returncode
        with contextlib.suppress(BlockingIOError, OSError):
            data = os.read(self._output, 1 << 16)
            self._tail = (self._tail + data)[-TAIL:]
            self._hear(data)
        ending = (
            "closed its pipe"
            if code is None
            else f"was killed by {_signal(-code)}"
            if code < 0
            else f"exited with code {code}"
        )
        printed = printable(self._tail.decode(errors="replace")).strip()
        return f"the process {ending}" + (f"; it last printed: {printed[-500:]}" if printed else "")

    def signal_group(self) -> None:
        """Kill the process and its process group. Can be called from any thread.

        Descendants that have left the group survive; ``kill`` kills them too.
        """
        self.child.note_descendants()
        self.child.signal_group()

    def kill(self) -> None:
        """Kill the process and all its descendants, even in other sessions, and wait until it has ended."""
        self.child.note_descendants()
        self.child.end()
        with contextlib.suppress(BlockingIOError, OSError):  # read the output that came after the last reply
            self._hear(os.read(self._output, 1 << 16))
        self._events.close()
        os.close(self._replies)
        for stream in (self.child.stdin, self.child.stdout):
            assert stream is not None
            stream.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class Load:
    """An object that a worker process must load before it takes requests that use it."""

    key: str  # name by which a process recognises an object that it has loaded
    packed: Mapping[str, Any]  # plain values from which the worker builds it
    file: str  # the user's file; empty if there is none
    built_in: bool  # whether it comes with rlflow; such objects have their own processes
    rule: str  # code of the error if the object cannot be loaded
    name: str  # name of the object in messages

    def cannot(self, reply: Mapping[str, Any]) -> PlanError:
        """Return the error to raise if a worker replies that it couldn't load this object."""
        failure, line = reply["failed"], reply["line"]
        error = PlanError.of(
            self.rule,
            f"the {self.name} cannot be loaded: {failure}",
            place=Place(self.file, line) if self.file else None,
            remedy="make sure that the file can be run by itself: python FILE",
        )
        failure.add_notes_to(error)
        return error


class WorkerPool(Generic[Job]):
    """Slots with worker processes, which start with the first job and end when the pool is closed.

    Threads may use the pool concurrently. ``name``: name of its threads. ``closed``: the error message of a
    closed pool. ``program``: the module that the processes run. ``confinement``: the permissions of users'
    code. ``clock``: the clock for deadlines, in seconds.
    """

    def __init__(
        self,
        name: str,
        closed: str,
        program: str,
        confinement: Confinement = STRICT,
        on_output: OnOutput = lambda data: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # ``on_output`` is called with the processes' output, from several threads.
        self.name, self.on_output = name, on_output
        self.program, self.confinement, self.clock = program, confinement, clock
        self.slots: list[Slot[Job]] = []
        self.closed = threading.Event()
        # held while slots and jobs start, so that none starts after the pool is closed
        self.lock = threading.Lock()
        self._message = closed

    def begin(self, slot: Slot[Job]) -> None:
        """Start a slot. The caller must hold ``lock``. Raises RuntimeError if the pool is closed."""
        self.check_open()
        if not self.slots:
            atexit.register(self.close)
        self.slots.append(slot)
        slot.start()

    def check_open(self) -> None:
        """Raise RuntimeError if the pool is closed."""
        if self.closed.is_set():
            raise RuntimeError(self._message)

    def put(self, jobs: queue.SimpleQueue[Job | None], job: Job) -> None:
        """Put a job into the queue ``jobs``. Raises RuntimeError if the pool is closed."""
        with self.lock:
            self.check_open()
            jobs.put(job)

    def close(self) -> None:
        """Kill all processes. Jobs in progress end with RuntimeError."""
        with self.lock:
            self.closed.set()
        slots = [*self.slots]
        for slot in slots:
            slot.stop()
        for slot in slots:
            slot.join()
        atexit.unregister(self.close)

    def pids(self) -> list[int]:
        """Return the process ids of the running workers."""
        return [process.child.pid for slot in [*self.slots] for process in [*slot.processes.values()]]


class Slot(threading.Thread, Generic[Job]):
    """A thread that runs jobs with up to two worker processes: one for users' code, one for built-in scorers.

    It starts the processes, sends them requests, and kills and restarts them if they miss a deadline.
    Subclasses define how to do a job.
    """

    def __init__(self, pool: WorkerPool[Job], jobs: queue.SimpleQueue[Job | None]) -> None:
        super().__init__(name=pool.name, daemon=True)
        self.pool, self.jobs = pool, jobs
        # True → the process for built-in scorers; False → the process for users' code
        self.processes: dict[bool, WorkerProcess] = {}
        self._guard = threading.Lock()

    def do(self, job: Job) -> None:
        """Do a job. If this raises an exception, the slot passes it to ``fail``."""
        raise NotImplementedError

    def fail(self, job: Job, error: BaseException) -> None:
        """End a job with an error, which is raised in the thread that waits for the job."""
        raise NotImplementedError

    def run(self) -> None:
        """Run jobs until ``stop``, then end the processes."""
        while (job := self.jobs.get()) is not None:
            try:
                self.do(job)
            except BaseException as error:
                self.fail(job, error)
        for built_in in (True, False):
            self.kill(built_in)

    def stop(self) -> None:
        """Kill the slot's processes and end its thread. Called from other threads."""
        with self._guard:
            for process in self.processes.values():
                process.signal_group()
        self.jobs.put(None)

    def feed(
        self, load: Load, message: dict[str, Any], seconds: float, checks: Iterator[Callable[[Any], Any]]
    ) -> Iterator[Any]:
        """Send a request, and yield its replies as they arrive, each converted by the next of ``checks``.

        Loads ``load`` first if necessary. Each reply must arrive within ``seconds``. Raises Idle if the
        process ends before taking the request; after that, Died if the process ends, and RewardLate if it
        misses a deadline. Raises PlanError if the object can't be loaded, and RuntimeError if the pool is
        closed.
        """
        try:
            process = self._ready(load)
            process.send(message, START)
            process.receive(START)
        except (Died, RewardLate) as stopped:
            self._ended(load)
            raise Idle(str(stopped)) from None
        try:
            for place, check in enumerate(checks):
                yield check(process.receive(seconds, place))
        except (Died, RewardLate):
            self._ended(load)
            raise

    def kill(self, built_in: bool) -> None:
        """Kill the slot's process for built-in scorers, or the one for users' code.

        The next request starts a new process.
        """
        with self._guard:
            process = self.processes.pop(built_in, None)
        if process is not None:
            process.kill()

    def _ready(self, load: Load) -> WorkerProcess:
        """Return the slot's process, started if necessary and with the object loaded."""
        pool = self.pool
        with self._guard:
            pool.check_open()
            if (process := self.processes.get(load.built_in)) is None:
                process = WorkerProcess(
                    load.built_in,
                    pool.confinement,
                    pool.on_output,
                    pool.program,
                    pool.clock,
                )
                self.processes[load.built_in] = process
        if load.key not in process.loaded:
            process.send({"key": load.key, "file": load.file, "load": load.packed}, START)
            reply = process.receive(START)
            if "failed" in reply:
                raise load.cannot(reply)
            process.loaded.add(load.key)
        return process

    def _ended(self, load: Load) -> None:
        self.kill(load.built_in)
        self.pool.check_open()


def _own_folder() -> str:
    """Create an empty folder that only this user can read, and return its path.

    If this process is killed, the run's watchdog recognizes the folder by its name and removes it.
    """
    run = os.environ.get(process_tag.MARK, "").rpartition("/")[2]
    return tempfile.mkdtemp(prefix=f"rlflow-{run}-" if run else "rlflow-", suffix=".reward")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
