"""Worker processes that stay loaded and score rows.

If a row hangs or crashes its process, only that row's score is lost, and another process scores the rest.

Starting a process takes more CPU time than most rewards need for a batch. So the pool starts with a single
process, and adds more when rows have to wait, up to the number of cores. It only grows further if its
processes mostly wait, for example for a judge model on another machine.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlflow.data.scorer import ScorerSpec
from rlflow.errors import PlanError
from rlflow.rewards.confinement import STRICT, Confinement
from rlflow.rewards.forms import FORMS
from rlflow.rewards.scorers import BUILT_IN
from rlflow.rewards.values import KEY, LONGEST, NAN, NONE, OTHERS, STEP, Results, missing
from rlflow.rewards.worker_pool import (
    GRACE,
    START,
    TRIES,
    Died,
    Idle,
    Load,
    RewardLate,
    Slot,
    WorkerPool,
    in_worker,
)

if TYPE_CHECKING:
    from rlflow.rewards.remote import RemoteReward

CHUNK = 32  # maximum number of rows in one message
# The pool starts another process after rows have waited this many seconds for processes, summed over all
# calls.
GROWTH = 0.5
ALTOGETHER = 32  # maximum number of processes in a pool without a configured size
# A process counts as waiting if it computes, or would compute on a free core, for less than this share of the
# time.
IDLE = 0.5
AT_ONCE = 64  # maximum number of rows in one message to an async function
# Causes of a missing score; see Results in values.py.
CAUSES = (NONE, "nan", "overflow", "type", "raised", "timeout", "died")


@dataclass(eq=False)
class _Call:
    """A call of ``submit`` in progress. Slot threads store results, and one thread waits for all of them."""

    scorer: ScorerSpec
    names: tuple[str, ...]  # names of the columns in ``rows``
    rows: Sequence[Sequence[Any]]  # values of these columns, for each row
    timeout: float  # seconds for each row
    results: Results
    left: int  # rows without a result
    # Set when all rows have a result, or the call has failed.
    done: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: BaseException | None = None  # the error that ended the call

    def put(self, row: int, reply: Any) -> None:
        """Store the result of a row.

        ``reply``: a number, a dictionary with the score and further numbers or an answer, or (cause, reason).
        """
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
                cause, reason = reply
                self.results.missing[cause] += 1
                if cause == NONE:
                    self.results.none.add(row)
                self.results.first.setdefault(cause, reason)
            self.left -= 1
            if not self.left:
                self.done.set()

    def fail(self, error: BaseException) -> None:
        """End the call with an error. Only the first error is kept."""
        self.error = self.error or error
        self.done.set()


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Adjacent rows of a call, sent to one worker in a single message."""

    call: _Call
    rows: range
    tries: int = 0  # number of workers that died before they took the chunk


class RewardPool(WorkerPool[_Chunk]):
    """Up to ``workers`` processes for users' rewards, and up to ``workers`` more for built-in scorers.

    All rewards of a run share the pool, and threads may use it concurrently. If ``workers`` isn't given, the
    number of processes depends on the machine and the rewards. The first request starts the first process.
    ``confinement``: the permissions of users' rewards. ``clock``: the clock for row deadlines, in seconds.
    """

    def __init__(
        self,
        workers: int | None = None,
        confinement: Confinement = STRICT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            "reward", "the reward pool is closed", "rlflow.rewards.reward_worker", confinement, clock=clock
        )
        self.cores = max(2, os.cpu_count() or 1)
        self.workers, self._named = workers or max(self.cores, ALTOGETHER), workers is not None
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        self._remotes: dict[str, RemoteReward] = {}  # URL → connection to the server
        self._waited = 0.0
        # At the last growth: CPU seconds used by the processes, and the time.
        self._counted = (0.0, 0.0)

    def score(
        self, scorer: ScorerSpec, names: Sequence[str], rows: Sequence[Sequence[Any]], timeout: float = 60.0
    ) -> Results:
        """Score rows, and return their results.

        ``rows``: for each row, the values of the columns ``names``. ``timeout``: seconds to score a row.
        Raises PlanError if the scorer cannot be loaded.
        """
        return self.wait(self.submit(scorer, names, rows, timeout))

    def submit(
        self, scorer: ScorerSpec, names: Sequence[str], rows: Sequence[Sequence[Any]], timeout: float = 60.0
    ) -> _Call:
        """Start scoring rows, and return the call to pass to ``wait``.

        The arguments are those of ``score``.
        """
        with self.lock:
            self.check_open()
            if not self.slots:
                _refuse_in_worker()
                self.begin(_RewardSlot(self, self._chunks))
        call = _Call(scorer, tuple(names), rows, timeout, Results([NAN] * len(rows)), len(rows))
        processes = self.workers if self._named else max(self.cores, len(self.slots))
        size = AT_ONCE if scorer.settings.get("later") else min(CHUNK, max(1, len(rows) // (4 * processes)))
        for start in range(0, len(rows), size):
            self.put(self._chunks, _Chunk(call, range(start, min(start + size, len(rows)))))
        if not rows:
            call.done.set()
        return call

    def wait(self, call: _Call) -> Results:
        """Wait until the rows of a submitted call are scored, and return their results.

        Raises the error that ended the call: PlanError if the scorer can't be loaded, RuntimeError if the
        pool is closed.
        """
        try:
            while not call.done.wait(STEP):
                self._grow(call.scorer)
        except BaseException:  # this thread was interrupted: the remaining scores are not needed
            call.fail(RuntimeError("scoring was interrupted, so that these rewards are not needed"))
            raise
        if call.error is not None:
            raise call.error
        return call.results

    def close(self) -> None:
        """Kill all workers. Threads that are waiting for scores get RuntimeError."""
        for remote in self._remotes.values():
            remote.close()
        super().close()

    def remote(self, url: str) -> RemoteReward:
        """Return the client for the reward server at ``url``.

        Rewards that use the same server share it, and closing the pool closes it.
        """
        from rlflow.rewards.remote import RemoteReward

        with self.lock:
            if url not in self._remotes:
                self._remotes[url] = RemoteReward(url)
            return self._remotes[url]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _grow(self, scorer: ScorerSpec) -> None:
        """Record that rows had to wait, and add slots once they have waited long enough in total.

        No slot is added while a process is still loading the scorer, because another process would slow it
        down.
        """
        with self.lock:
            if (
                len(self.slots) < self.workers
                and not self.closed.is_set()
                and all(_has(slot, scorer) for slot in self.slots)
            ):
                self._waited += STEP
                if self._waited >= GROWTH:
                    self._waited = 0.0
                    for _ in range(self._more()):
                        self.begin(_RewardSlot(self, self._chunks))

    def _more(self) -> int:
        """Return how many slots to add when rows have to wait.

        If the user set the number of workers, all remaining slots are added. Otherwise slots are added one by
        one up to the number of cores, and then doubled each time, but only if the processes mostly wait.
        """
        count = len(self.slots)
        if self._named:
            return self.workers - count
        before, self._counted = self._counted, (computed(self.pids()), time.monotonic())
        if count < self.cores:
            return 1
        used, passed = (now - then for now, then in zip(self._counted, before, strict=True))
        return min(count, self.workers - count) if used < IDLE * passed * count else 0


class _RewardSlot(Slot[_Chunk]):
    """A slot of the pool, which scores chunks of rows.

    If its process dies or misses the deadline while scoring a row, that row's score is missing.
    """

    def do(self, job: _Chunk) -> None:
        if job.call.error is not None:
            return
        scored = 0
        try:
            for scored, reply in enumerate(self._scores(job), 1):
                job.call.put(job.rows[scored - 1], reply)
        except Idle as stopped:
            if job.tries + 1 == TRIES:
                raise _cannot_start(job.call.scorer, stopped) from None
            self.pool.put(self.jobs, replace(job, tries=job.tries + 1))
        except (Died, RewardLate) as stopped:
            self._go_on(job.call, job.rows[scored:], len(job.rows) > 1, stopped)

    def fail(self, job: _Chunk, error: BaseException) -> None:
        job.call.fail(error)

    def _scores(self, chunk: _Chunk) -> Iterator[Any]:
        """Yield the result of each row as soon as the worker sends it."""
        call, load = chunk.call, _load(chunk.call.scorer)
        request = {
            "key": load.key,
            "names": call.names,
            "rows": [call.rows[row] for row in chunk.rows],
            "timeout": call.timeout,
        }
        seconds = call.timeout + (GRACE if _is_together(call.scorer) else 0)
        return self.feed(
            load, request, seconds, repeat(partial(_verdict, built_in=load.built_in), len(chunk.rows))
        )

    def _go_on(self, call: _Call, left: range, several: bool, stopped: Died | RewardLate) -> None:
        """Continue scoring after a process died or missed a deadline.

        ``left``: the rows without a result; the process failed at the first of them. ``several``: True if the
        process had been sent several rows in one message.
        """
        if _is_together(call.scorer) and several:  # the faulty row is unknown, so score each row separately
            for unknown in left:
                self.pool.put(self.jobs, _Chunk(call, range(unknown, unknown + 1)))
            return
        if left[1:]:
            self.pool.put(self.jobs, _Chunk(call, left[1:]))
        call.put(left[0], _cause(stopped, call.timeout))


def _load(scorer: ScorerSpec) -> Load:
    name, file = f"reward {_named(scorer)}", scorer.settings.get("file", "")
    return Load(scorer.key, scorer.packed, file, scorer.kind in BUILT_IN, "reward-load", name)


def _has(slot: Slot[_Chunk], scorer: ScorerSpec) -> bool:
    """True if the slot's process has loaded the scorer."""
    process = slot.processes.get(scorer.kind in BUILT_IN)
    return process is not None and scorer.key in process.loaded


def computed(processes: Sequence[int]) -> float:
    """Return the CPU seconds that processes used, plus the seconds they waited for a free core.

    Waiting for a core is included so that a computing process doesn't look idle on a busy machine. Only Linux
    reports this time; elsewhere it's 0.
    """
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
    """True if the worker scores the rows of a message concurrently, or with one call for all of them.

    The pool then can't tell which row is late.
    """
    form = FORMS.get(scorer.settings.get("form", ""))
    return bool(scorer.settings.get("later")) or (form is not None and form.batch)


def _verdict(reply: Any, built_in: bool) -> Any:
    """Check a worker's reply about a row, and return a score or (cause, reason).

    A score is a finite number. A built-in scorer's score must also be from 0 to 1; if it isn't, (cause,
    reason) is returned instead. Raises Died for any other reply, because no scorer could have sent it.
    """
    score = reply["score"] if isinstance(reply, dict) and _with_more(reply, built_in) else reply
    if isinstance(score, float) and math.isfinite(score):
        return (
            reply
            if not built_in or 0 <= score <= 1
            else ("type", f"the scorer returned {score:g}, not a number from 0 to 1")
        )
    if (reason := missing(reply, CAUSES)) is not None:
        return reason
    raise Died("the process sent a reply that is not a score")


def _with_more(reply: dict[Any, Any], built_in: bool) -> bool:
    """True for a valid reply that has more than a score: an answer or further numbers.

    Built-in scorers must not send further numbers.
    """
    others, answer = reply.get("others", {}), reply.get("answer", "")
    if not {"score"} < reply.keys() <= {"score", "answer"} | (set() if built_in else {"others"}):
        return False
    if (
        not isinstance(answer, str)
        or len(answer) > LONGEST
        or not isinstance(others, dict)
        or len(others) > OTHERS
    ):
        return False
    return all(isinstance(key, str) and KEY.fullmatch(key) for key in others) and all(
        isinstance(number, float) and math.isfinite(number) for number in others.values()
    )


def _cause(stopped: Died | RewardLate, timeout: float) -> tuple[str, str]:
    if isinstance(stopped, RewardLate):
        return "timeout", f"no score after {timeout:g} s; the process was killed"
    return "died", str(stopped)


def _cannot_start(scorer: ScorerSpec, stopped: Idle) -> PlanError:
    why = str(stopped) or f"no answer after {START:g} s"
    return PlanError.of(
        "reward-load",
        f"the process for reward {_named(scorer)} failed to start {TRIES} times in a row: {why}",
        expected="a process that loads the reward and answers",
        remedy=f"import the reward in a Python of your own: it has to load within {START:g} s, without ending the "
        "process",
    )


def _named(scorer: ScorerSpec) -> str:
    name = scorer.settings.get("function") or scorer.settings.get("task") or scorer.kind
    return f"'{name}'"


def _refuse_in_worker() -> None:
    if in_worker():
        raise PlanError.of(
            "reward-nested",
            "a reward's file starts a run when it is loaded",
            found="a call of rlflow.run at its top level",
            expected="only definitions at the top level",
            remedy='put the call under: if __name__ == "__main__":',
        )
