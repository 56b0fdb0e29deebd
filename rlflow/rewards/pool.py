"""RewardPool: warm worker processes that score rows. A row that hangs or crashes loses its own score alone; the rows after it are scored by
another process.

Starting a process takes more processor time than most rewards take to score a batch. So the pool starts with one process, and adds others
when rows have waited: up to the number of cores, and beyond it only where the processes mostly wait themselves, for a judge elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.data.scorer import ScorerSpec
from rlflow.errors import Place, PlanError
from rlflow.rewards.confinement import STRICT, Confinement
from rlflow.rewards.forms import FORMS
from rlflow.rewards.process import Died, Hear, RewardLate, WorkerProcess, in_worker
from rlflow.rewards.scorers import BUILT_IN
from rlflow.rewards.values import KEY, LONGEST, OTHERS

if TYPE_CHECKING:
    from rlflow.rewards.remote import RemoteReward

CHUNK = 32  # rows of one message at most
START = 120.0  # seconds for a worker to start and load a scorer
GROWTH = 0.5  # seconds, summed over all calls, that rows wait for ready processes before another process is started
STEP = 0.05  # seconds between two looks at a call that waits; shorter waits do not count
ALTOGETHER = 32  # most processes of a pool whose size nobody named
IDLE = 0.5  # share of the time that processes compute, or would if they had a core, below which they are waiting
AT_ONCE = 64  # most rows of one message to an async function
GRACE = 1.0  # seconds beyond a row's deadline after which a process that scores several rows together is killed
TRIES = 3  # workers in a row that may die while loading a scorer, or before the first row of a chunk
NAN = float("nan")
CAUSES = ("none", "nan", "overflow", "type", "raised", "timeout", "died")  # why a score is missing; see Results


@dataclass
class Results:
    """The scores of a request's rows. Causes of missing ones: none (the function returned None), nan (not finite), overflow (finite, and
    too large for float32), type (no number), raised, timeout, died."""

    values: list[float]  # one score for each row, in order; NaN where it is missing
    missing: Counter[str] = field(default_factory=Counter)  # cause → number of missing scores
    first: dict[str, str] = field(default_factory=dict)  # cause → message of the first missing score
    others: dict[str, list[float]] = field(default_factory=dict)  # key → a number of each row beside its score; NaN where it has none
    answers: dict[int, str] = field(default_factory=dict)  # row → the answer that the scorer read out of its response, where it gave one


@dataclass(eq=False)
class _Call:
    """One request that is under way: threads of slots put results, one thread waits for all of them."""

    scorer: ScorerSpec
    names: tuple[str, ...]  # columns of the rows
    rows: Sequence[Sequence[Any]]  # values of these columns, for each row
    timeout: float  # seconds for each row
    results: Results
    left: int  # rows without a result
    done: threading.Event = field(default_factory=threading.Event)  # set when all rows have a result, or the call has failed
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: BaseException | None = None  # what ended the call as a whole

    def put(self, row: int, reply: Any) -> None:
        """Store the result of a row: a number, a number with others or an answer beside it, or (cause, message)."""
        with self.lock:
            if isinstance(reply, dict):
                for key, number in reply.get("others", {}).items():
                    self.results.others.setdefault(key, [NAN] * len(self.rows))[row] = number
                if "answer" in reply:
                    self.results.answers[row] = reply["answer"]
                reply = reply["score"]
            if isinstance(reply, float):
                self.results.values[row] = reply
            else:
                cause, message = reply
                self.results.missing[cause] += 1
                self.results.first.setdefault(cause, message)
            self.left -= 1
            if not self.left:
                self.done.set()

    def fail(self, error: BaseException) -> None:
        """End the call with an error; the first one counts."""
        self.error = self.error or error
        self.done.set()


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Adjacent rows of a call that go to one worker in one message."""

    call: _Call
    rows: range
    tries: int = 0  # workers that have died before the first of these rows


class RewardPool:
    """Up to ``workers`` processes for users' rewards and as many for built-in scorers, shared by all rewards of a run; without a number, as
    many as suit the machine and the rewards. The first process starts with the first request. Several threads may use the pool at once.
    ``confinement``: what users' rewards may do. ``clock``: gives the seconds that deadlines of rows count."""

    def __init__(
        self, workers: int | None = None, confinement: Confinement = STRICT, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.cores = max(2, os.cpu_count() or 1)
        self.workers, self.confinement = workers or max(self.cores, ALTOGETHER), confinement
        self._named, self._clock = workers is not None, clock
        self.hear: Hear = lambda data: None  # called with what processes print, from several threads
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._slots: list[_Slot] = []
        self._remotes: dict[str, RemoteReward] = {}  # by URL
        self._waited = 0.0
        self._counted = (0.0, 0.0)  # when the pool last grew: seconds of processor time of its processes, and the time
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def score(self, scorer: ScorerSpec, names: Sequence[str], rows: Sequence[Sequence[Any]], timeout: float = 60.0) -> Results:
        """Score rows, each with the values of the columns ``names``, within ``timeout`` seconds for each row. Raises PlanError where the
        scorer cannot be loaded."""
        return self.wait(self.submit(scorer, names, rows, timeout))

    def submit(self, scorer: ScorerSpec, names: Sequence[str], rows: Sequence[Sequence[Any]], timeout: float = 60.0) -> _Call:
        """Start scoring rows; see ``score``. ``wait`` gives the results."""
        self._start()
        call = _Call(scorer, tuple(names), rows, timeout, Results([NAN] * len(rows)), len(rows))
        processes = self.workers if self._named else max(self.cores, len(self._slots))
        size = AT_ONCE if scorer.settings.get("later") else min(CHUNK, max(1, len(rows) // (4 * processes)))
        for start in range(0, len(rows), size):
            self._chunks.put(_Chunk(call, range(start, min(start + size, len(rows)))))
        if not rows:
            call.done.set()
        return call

    def wait(self, call: _Call) -> Results:
        """The results of a submitted call, once all rows have one. Raises what ended the call, PlanError for a scorer that cannot be
        loaded and RuntimeError for a closed pool."""
        try:
            while not call.done.wait(STEP):
                self._grow(call.scorer)
        except BaseException:  # interrupted: its other rows need not be scored
            call.fail(RuntimeError("no one waits for these rewards"))
            raise
        if call.error is not None:
            raise call.error
        return call.results

    def close(self) -> None:
        """Kill all workers. Scoring under way raises RuntimeError."""
        with self._lock:
            self._closed.set()
        for remote in self._remotes.values():
            remote.close()
        for slot in self._slots:
            slot.stop()
            self._chunks.put(None)
        for slot in self._slots:
            slot.join()
        while not self._chunks.empty():
            if (chunk := self._chunks.get()) is not None:
                chunk.call.fail(_closed())
        atexit.unregister(self.close)

    def remote(self, url: str) -> RemoteReward:
        """The connection to the server at ``url``, one for all rewards; it ends with the pool."""
        from rlflow.rewards.remote import RemoteReward

        with self._lock:
            if url not in self._remotes:
                self._remotes[url] = RemoteReward(url)
            return self._remotes[url]

    def processes(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [process.child.pid for slot in self._slots for process in list(slot.processes.values())]

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        with self._lock:
            if self._closed.is_set():
                raise _closed()
            if not self._slots:
                _refuse_in_worker()
                atexit.register(self.close)
                self._add()

    def _grow(self, scorer: ScorerSpec) -> None:
        """Count the wait, and add a slot when waits have summed up. None is added while a process still loads: it would only be slowed
        down."""
        with self._lock:
            if len(self._slots) < self.workers and not self._closed.is_set() and all(slot.has(scorer) for slot in self._slots):
                self._waited += STEP
                if self._waited >= GROWTH:
                    self._waited = 0.0
                    for _ in range(self._more()):
                        self._add()

    def _more(self) -> int:
        """How many slots to add now that rows have waited: all of a number that was named; else one up to the number of cores, and beyond
        it as many as there are where the processes mostly wait."""
        count = len(self._slots)
        if self._named:
            return self.workers - count
        before, self._counted = self._counted, (computed(self.processes()), time.monotonic())
        if count < self.cores:
            return 1
        used, passed = (now - then for now, then in zip(self._counted, before, strict=True))
        return min(count, self.workers - count) if used < IDLE * passed * count else 0

    def _add(self) -> None:
        slot = _Slot(self._chunks, self._closed, partial(WorkerProcess, confinement=self.confinement, hear=self.hear, clock=self._clock))
        self._slots.append(slot)
        slot.start()


class _Slot(threading.Thread):
    """A thread with up to two worker processes, one for users' rewards and one for built-in scorers: it starts them, sends them rows, kills
    them at a row's deadline and starts the next ones."""

    def __init__(
        self, chunks: queue.SimpleQueue[_Chunk | None], closed: threading.Event, make: Callable[[bool], WorkerProcess]
    ) -> None:
        """``make``: starts a process; told whether it is for built-in scorers."""
        super().__init__(name="reward", daemon=True)
        self.chunks, self.closed, self._make = chunks, closed, make
        self.processes: dict[bool, WorkerProcess] = {}  # key: whether the process is for built-in scorers
        self.lock = threading.Lock()

    def run(self) -> None:
        while (chunk := self.chunks.get()) is not None and not self.closed.is_set():
            if chunk.call.error is None:
                self._score(chunk)
        if chunk is not None:
            chunk.call.fail(_closed())
        for built_in in (True, False):
            self._replace(built_in)

    def stop(self) -> None:
        """Kill the slot's processes. Called from another thread, after ``closed`` was set."""
        with self.lock:
            for process in self.processes.values():
                process.signal_group()

    def has(self, scorer: ScorerSpec) -> bool:
        """Whether the slot's process has loaded the scorer. Called from another thread."""
        process = self.processes.get(_built_in(scorer))
        return process is not None and scorer.key in process.loaded

    def _score(self, chunk: _Chunk) -> None:
        try:
            process = self._ready(chunk.call.scorer)
            self._feed(process, chunk)
        except (Died, RewardLate) as stopped:
            self._replace(_built_in(chunk.call.scorer))
            if chunk.tries + 1 >= TRIES or self.closed.is_set():
                chunk.call.fail(_closed() if self.closed.is_set() else _cannot_start(chunk.call.scorer, stopped))
            else:
                self.chunks.put(_Chunk(chunk.call, chunk.rows, chunk.tries + 1))
        except BaseException as error:  # into the thread that waits
            chunk.call.fail(error)

    def _ready(self, scorer: ScorerSpec) -> WorkerProcess:
        """The slot's process, with the scorer loaded."""
        with self.lock:
            if self.closed.is_set():
                raise _closed()
            kind = _built_in(scorer)
            process = self.processes[kind] = self.processes.get(kind) or self._make(kind)
        if scorer.key not in process.loaded:
            process.send({"key": scorer.key, "load": scorer.packed}, START)
            reply = process.receive(START)
            if "failed" in reply:
                raise _cannot_load(scorer, reply)
            process.loaded.add(scorer.key)
        return process

    def _feed(self, process: WorkerProcess, chunk: _Chunk) -> None:
        """Send the rows and receive their scores. A process that dies or is late at a row gives that row the cause. Raises Died and
        RewardLate for a process that dies or is late before the first row."""
        call = chunk.call
        process.send({"key": call.scorer.key, "names": call.names, "rows": [call.rows[row] for row in chunk.rows],
                      "timeout": call.timeout}, START)  # fmt: skip
        process.receive(START)
        seconds = call.timeout + (GRACE if _is_together(call.scorer) else 0)
        for place, row in enumerate(chunk.rows):
            try:
                call.put(row, _verdict(process.receive(seconds, place), process.built_in))
            except (Died, RewardLate) as stopped:
                self._replace(process.built_in)
                if self.closed.is_set():
                    raise _closed() from None
                if _is_together(call.scorer) and len(chunk.rows) > 1:  # any of the rows may be the one: each is scored by itself
                    for unknown in chunk.rows[place:]:
                        self.chunks.put(_Chunk(call, range(unknown, unknown + 1)))
                    return
                if unscored := chunk.rows[place + 1 :]:
                    self.chunks.put(_Chunk(call, unscored))
                call.put(row, _cause(stopped, call.timeout))
                return

    def _replace(self, built_in: bool) -> None:
        """Kill the process; the next chunk starts another."""
        with self.lock:
            process = self.processes.pop(built_in, None)
        if process is not None:
            process.kill()


def computed(processes: Sequence[int]) -> float:
    """Seconds of processor time that processes have taken, and seconds in which they could not go on because others had the processor:
    on a busy machine a process that computes would otherwise look like one that waits (Linux tells it; elsewhere the first alone)."""
    import psutil

    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += sum(psutil.Process(process).cpu_times()[:2])
        for path in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, LookupError):
                total += int(path.read_text().split()[1]) / 1e9
    return total


def _is_together(scorer: ScorerSpec) -> bool:
    """Whether the rows of one message are scored side by side or by one call, so that it cannot be told which of them holds up the
    process."""
    form = FORMS.get(scorer.settings.get("form", ""))
    return bool(scorer.settings.get("later")) or (form is not None and form.batch)


def _built_in(scorer: ScorerSpec) -> bool:
    return scorer.kind in BUILT_IN


def _verdict(reply: Any, built_in: bool) -> Any:
    """The reply where it can be a score: a finite number (from 0 to 1 for built-in scorers), or [cause, message] for a missing one. Raises
    Died for any other reply, which no scorer can have sent."""
    score = reply["score"] if isinstance(reply, dict) and _with_more(reply, built_in) else reply
    if isinstance(score, float) and math.isfinite(score):
        return reply if not built_in or 0 <= score <= 1 else ("type", f"the scorer gave {score:g}, not a number from 0 to 1")
    if isinstance(reply, list) and len(reply) == 2 and reply[0] in CAUSES and isinstance(reply[1], str):
        return reply
    raise Died("the process sent what is no score")


def _with_more(reply: dict[Any, Any], built_in: bool) -> bool:
    """Whether the reply has a score, and beside it the answer of the response or, of users' functions, other numbers."""
    others, answer = reply.get("others", {}), reply.get("answer", "")
    if not {"score"} < reply.keys() <= {"score", "answer"} | (set() if built_in else {"others"}):
        return False
    if not isinstance(answer, str) or len(answer) > LONGEST or not isinstance(others, dict) or len(others) > OTHERS:
        return False
    return all(isinstance(key, str) and KEY.fullmatch(key) for key in others) and all(
        isinstance(number, float) and math.isfinite(number) for number in others.values())


def _cause(stopped: Died | RewardLate, timeout: float) -> tuple[str, str]:
    if isinstance(stopped, RewardLate):
        return "timeout", f"no score after {timeout:g} s; the process was killed"
    return "died", str(stopped)


def _closed() -> RuntimeError:
    return RuntimeError("the reward pool is closed")


def _cannot_load(scorer: ScorerSpec, reply: dict[str, Any]) -> PlanError:
    file = scorer.settings.get("file")
    place = Place(file, reply["line"]) if file else None
    return PlanError.of("reward-load", f"the reward {_named(scorer)} cannot be loaded: {reply['failed']}", place=place,
                        remedy="its file must load by itself: python FILE")


def _cannot_start(scorer: ScorerSpec, stopped: Died | RewardLate) -> PlanError:
    why = str(stopped) or f"no answer after {START:g} s"
    return PlanError.of("reward-load", f"the process for reward {_named(scorer)} does not start, {TRIES} times in a row: {why}",
                        expected="a process that loads the reward and answers")


def _named(scorer: ScorerSpec) -> str:
    name = scorer.settings.get("function") or scorer.settings.get("task") or scorer.kind
    return f"'{name}'"


def _refuse_in_worker() -> None:
    if in_worker():
        raise PlanError.of("reward-nested", "a reward's file starts a run when it is loaded", found="rlflow.run at its top level",
                           expected="only definitions", remedy='put the run under: if __name__ == "__main__":')
