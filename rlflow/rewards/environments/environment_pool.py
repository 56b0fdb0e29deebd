"""Processes that run episodes.

If a call hangs or crashes its process, only that call's episode fails. A new process replays the other
episodes, with the same replies from the model, and continues them.
"""

from __future__ import annotations

import itertools
import math
import os
import queue
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from rlflow.author.messages import CHANGES, is_messages
from rlflow.errors import PlanError, Reason
from rlflow.rewards.confinement import STRICT, Confinement
from rlflow.rewards.environments.environment_spec import EnvironmentSpec
from rlflow.rewards.values import LARGEST, NOT_HELD, missing
from rlflow.rewards.worker_pool import (
    GRACE,
    START,
    TRIES,
    Died,
    Idle,
    Load,
    OnOutput,
    RewardLate,
    Slot,
    WorkerPool,
    WorkerProcess,
)

HELPERS = 8  # after a call has hung, the remaining calls of its process are split among this many processes
# Causes of a failed episode; see Failure.
CAUSES = ("raised", "type", "overflow", "timeout", "died", "diverged", "lost")


class Failure(NamedTuple):
    """Why an episode failed: a cause and a message."""

    # raised; type (an invalid answer); overflow (a number too large for float32); timeout; died; diverged (a
    # replay gave other answers); lost (the process ended and the environment does not allow replays)
    cause: str
    reason: Reason

    @staticmethod
    def of_sum(score: float) -> Failure | None:
        """Return an overflow failure if an episode's summed reward is too large for float32, or None."""
        held = abs(score) <= LARGEST
        return (
            None if held else Failure("overflow", f"the rewards of its turns add up to {score:g}, {NOT_HELD}")
        )


Answer = Mapping[str, Any] | Failure  # answer to a call, as the worker's ``checked`` returns it


@dataclass(eq=False)
class Episode:
    """The episode of one row. A process can replay it from the stored calls and answers."""

    number: int
    slot: int
    calls: list[Sequence[Any]] = field(default_factory=list)
    answers: list[Mapping[str, Any]] = field(default_factory=list)
    failure: Failure | None = None
    process: WorkerProcess | None = None  # the process that answered the episode's last call


class EnvironmentPool(WorkerPool["_Calls"]):
    """Up to ``spec.bounds.parallel`` processes that run episodes of one environment.

    Processes start when the first episodes are opened. Threads may share the pool. ``confinement``: the
    permissions of users' code. ``clock``: the clock for call deadlines, in seconds.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        confinement: Confinement = STRICT,
        on_output: OnOutput = lambda data: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(
            "environment",
            "the processes of the environment are closed",
            "rlflow.rewards.environments.environment_worker",
            confinement,
            on_output,
            clock,
        )
        self.spec = spec
        self.load = Load("", spec.packed, spec.path, False, "env-load", f"environment {spec.name}")
        self.processes = spec.bounds.parallel or max(2, os.cpu_count() or 1)
        self.failures: dict[str, Reason] = {}  # cause → reason of the first failure
        self.failed: Counter[str] = Counter()  # cause → number of failed episodes
        self._numbers = itertools.count()
        # the slots that run episodes; ``Episode.slot`` is an index of this list
        self._episode_slots: list[_EnvironmentSlot] = []

    def open(
        self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]
    ) -> tuple[list[Episode], list[Answer]]:
        """Start an episode for each row, and return (episodes, answers).

        ``rows``: each row's columns, by name. ``seeds``: one per row. An answer is the episode's first
        message, or a Failure.
        """
        self._start(min(self.processes, max(len(rows), 1)))
        count = min(self.processes, max(len(rows), 1))
        numbers = [next(self._numbers) for _ in rows]
        episodes = [Episode(number, place % count) for place, number in enumerate(numbers)]
        if not self.spec.source.opens:
            return episodes, [{"says": ""} for _ in rows]
        calls = [
            ["open", episode.number, dict(row), seed]
            for episode, row, seed in zip(episodes, rows, seeds, strict=True)
        ]
        return episodes, self.call(episodes, calls)

    def step(self, episodes: Sequence[Episode], replies: Sequence[str]) -> list[Answer]:
        """Send the model's reply to each episode, and return the answer or Failure of each."""
        return self.call(
            episodes,
            [["step", episode.number, text] for episode, text in zip(episodes, replies, strict=True)],
        )

    def tools(
        self, episodes: Sequence[Episode], calls: Sequence[Sequence[tuple[str, Mapping[str, Any]]]]
    ) -> list[Answer]:
        """Run each episode's tool calls, and return the answer or Failure of each episode.

        ``calls``: for each episode, its tool calls as (tool name, arguments).
        """
        return self.call(
            episodes,
            [
                ["tools", episode.number, [list(each) for each in own]]
                for episode, own in zip(episodes, calls, strict=True)
            ],
        )

    def end(self, episodes: Sequence[Episode]) -> list[Answer]:
        """End episodes, and return the answer or Failure of each.

        An answer has a score if the environment returns one.
        """
        if not self.spec.source.ends:
            for episode in episodes:
                self._episode_slots[episode.slot].forget(episode)
            return [{} for _ in episodes]
        return self.call(episodes, [["end", episode.number] for episode in episodes])

    def call(self, episodes: Sequence[Episode], calls: Sequence[Sequence[Any]]) -> list[Answer]:
        """Make one call per episode, and return the answers or Failures in the same order.

        Raises PlanError if the class can't be loaded, and RuntimeError if the pool is closed.
        """
        answers: list[Answer | None] = [None] * len(episodes)
        places: dict[int, list[int]] = {}
        for place, episode in enumerate(episodes):
            places.setdefault(episode.slot, []).append(place)
        waiting = {
            slot: self._episode_slots[slot].submit([(episodes[place], calls[place]) for place in own])
            for slot, own in places.items()
        }
        for slot, future in waiting.items():
            for place, answer in zip(places[slot], future.result(), strict=True):
                answers[place] = answer
                if isinstance(answer, Failure):
                    self._count(answer)
        return [answer for answer in answers if answer is not None]

    def _count(self, failure: Failure) -> None:
        with self.lock:
            self.failed[failure.cause] += 1
            self.failures.setdefault(failure.cause, failure.reason)

    def _start(self, count: int) -> None:
        with self.lock:
            self.check_open()
            while len(self._episode_slots) < count:
                self._episode_slots.append(_EnvironmentSlot(self))
                self.begin(self._episode_slots[-1])


@dataclass(frozen=True, eq=False)
class _Calls:
    """Calls that a slot sends in one message, and the future for their answers."""

    calls: Sequence[tuple[Episode, Sequence[Any]]]
    answers: Future[list[Answer]] = field(default_factory=Future)


class _EnvironmentSlot(Slot[_Calls]):
    """A slot of the pool: a thread that sends calls to the process running its episodes.

    It sends one message at a time.
    """

    def __init__(self, pool: EnvironmentPool, helps: bool = False) -> None:
        """Create a slot.

        ``helps``: True if the slot has no episodes of its own and only helps another slot.
        """
        super().__init__(pool, queue.SimpleQueue())
        self._environments, self._helps = pool, helps
        self.spec = pool.spec
        self._over: list[int] = []  # finished episodes that the process no longer needs

    def do(self, job: _Calls) -> None:
        job.answers.set_result(self._answered(job.calls))

    def fail(self, job: _Calls, error: BaseException) -> None:
        job.answers.set_exception(error)

    def submit(self, calls: Sequence[tuple[Episode, Sequence[Any]]]) -> Future[list[Answer]]:
        """Queue calls for the slot's process, and return a future for their answers.

        Each call comes with its episode. Raises RuntimeError if the pool is closed.
        """
        job = _Calls(calls)
        self.pool.put(self.jobs, job)
        return job.answers

    def forget(self, episode: Episode) -> None:
        """Tell the process to drop an episode, along with the next message. Any thread may call this."""
        self._over.append(episode.number)

    def _answered(self, calls: Sequence[tuple[Episode, Sequence[Any]]]) -> list[Answer]:
        """Return the answer or Failure of each call, and store it in the call's episode."""
        answers: dict[int, Answer] = {}
        helped: dict[int, Answer] = {}  # answers from helper processes
        left, together, idle = list(range(len(calls))), True, 0
        while left:
            try:
                self._bring([calls[place][0] for place in left])
                portion = [place for place in left if calls[place][0].failure is None]
                portion = portion if together else portion[:1]
                replied, culprit = self._fed(
                    [calls[place] for place in portion], len(portion) > 1 and self.spec.source.later
                )
            except Idle as stopped:
                idle += 1
                if idle == TRIES:
                    raise _cannot_start(self.spec, str(stopped)) from None
                continue
            answers |= zip(portion, replied, strict=False)
            if culprit is not None and self.spec.source.later and len(portion) > 1:
                # It is unknown which of the concurrent calls is faulty, so run each call separately.
                together = False
            elif culprit is not None:
                answers[portion[len(replied)]] = calls[portion[len(replied)]][0].failure = culprit
            left = [place for place in left if place not in answers and calls[place][0].failure is None]
            if (
                culprit is not None
                and culprit.cause == "timeout"
                and len(left) > 1
                and self.spec.source.repeatable
                and not self._helps
            ):
                helped = self._helped(calls, left)
                left = []
        return [
            helped[place] if place in helped else self._kept(episode, call, answers.get(place))
            for place, (episode, call) in enumerate(calls)
        ]

    def _helped(
        self, calls: Sequence[tuple[Episode, Sequence[Any]]], left: Sequence[int]
    ) -> dict[int, Answer]:
        """Run the remaining calls in helper processes after another call has hung.

        ``left``: indices of these calls in ``calls``. They may hang too, so the helpers first replay the
        episodes and then run the calls in parallel, and all deadlines pass at the same time. The answers are
        stored in the episodes, and returned by index.
        """
        pool = self._environments
        helpers = [_EnvironmentSlot(pool, helps=True) for _ in range(min(len(left), HELPERS))]
        with pool.lock:
            for helper in helpers:
                pool.begin(helper)
        try:
            shares = [left[number :: len(helpers)] for number in range(len(helpers))]
            futures = [
                helper.submit([calls[place] for place in share])
                for helper, share in zip(helpers, shares, strict=True)
            ]
            return {
                place: answer
                for share, future in zip(shares, futures, strict=True)
                for place, answer in zip(share, future.result(), strict=True)
            }
        finally:
            with pool.lock:
                pool.slots = [slot for slot in pool.slots if slot not in helpers]
            for helper in helpers:
                helper.stop()
            for helper in helpers:
                helper.join()

    def _kept(self, episode: Episode, call: Sequence[Any], answer: Answer | None) -> Answer:
        """Store a call and its answer in the episode. Return the answer, or the Failure if there is none."""
        if answer is None or isinstance(answer, Failure):
            episode.failure = answer or episode.failure
            assert episode.failure is not None
            return episode.failure
        episode.calls.append(call)
        episode.answers.append(answer)
        return answer

    def _fed(
        self, calls: Sequence[tuple[Episode, Sequence[Any]]], side_by_side: bool
    ) -> tuple[list[Answer], Failure | None]:
        """Send calls to the process, and return (answers, failure).

        If the process dies or misses a deadline, ``answers`` stops before the call at fault; otherwise the
        failure is None. Raises Idle if the process ended before taking the calls.
        """
        if not calls:
            return [], None
        bounds, answers = self.spec.bounds, list[Answer]()
        over, self._over = self._over, []
        request = {"calls": [list(call) for _, call in calls], "seconds": bounds.seconds, "over": over}
        try:
            for answer in self.feed(
                self._environments.load,
                request,
                bounds.seconds + GRACE * side_by_side,
                (partial(_answer, call=call) for _, call in calls),
            ):
                calls[len(answers)][0].process = self.processes[False]
                answers.append(answer)
        except (Died, RewardLate) as stopped:
            return answers, _stopped(stopped, bounds.seconds)
        return answers, None

    def _bring(self, episodes: Sequence[Episode]) -> None:
        """Replay episodes from an earlier process in the current one.

        An episode fails if its replay crashes the process or gives different answers. The rest are then
        replayed in the next process.
        """
        while episode := next(
            (each for each in episodes if each.failure is None and each.calls and not self._has(each)), None
        ):
            if not self.spec.source.repeatable:
                episode.failure = Failure(
                    "lost",
                    "another episode ended the process, and the environment does not allow an "
                    "episode to be replayed (repeatable = False)",
                )
                continue
            again, culprit = self._fed([(episode, call) for call in episode.calls], False)
            if culprit is not None:
                episode.failure = Failure(
                    "diverged", f"in a replay it did not answer as before: {culprit.reason}"
                )
            elif again != episode.answers:
                where = next(
                    place
                    for place, (one, two) in enumerate(zip(again, episode.answers, strict=True))
                    if one != two
                )
                episode.failure = Failure(
                    "diverged",
                    f"in a replay, answer {where} differed: {_short(again[where])} instead of "
                    f"{_short(episode.answers[where])}",
                )

    def _has(self, episode: Episode) -> bool:
        return episode.process is not None and episode.process is self.processes.get(False)


def _answer(reply: Any, call: Sequence[Any]) -> Answer:
    """Return the reply if an environment could have sent it. Raises Died otherwise."""
    if (reason := missing(reply, CAUSES)) is not None:
        return Failure(*reason)
    if isinstance(reply, dict) and _sound(reply, call):
        return reply
    raise Died("the process sent a reply that is not a valid environment answer")


def _sound(reply: Mapping[Any, Any], call: Sequence[Any]) -> bool:
    numbers = [reply.get(name, 0.0) for name in ("reward", "score", *CHANGES)]
    numbers += [*(reply["log"].values() if isinstance(reply.get("log"), dict) else ())]
    texts = [reply.get("says", ""), *(reply["results"] if isinstance(reply.get("results"), list) else ())]
    known = {
        "open": {"says"},
        "step": {"says", "reward", "done", "log"},
        "tools": {"results"},
        "end": {"score"},
    }[call[0]]
    lacking = known - reply.keys() if call[0] != "end" else set()
    return (
        reply.keys() <= {*known, *CHANGES}
        and not lacking
        and all(map(_is_said, texts))
        and all(isinstance(number, float) and math.isfinite(number) for number in numbers)
    )


def _is_said(value: Any) -> bool:
    return isinstance(value, str) or is_messages(value)


def _stopped(stopped: Died | RewardLate, seconds: float) -> Failure:
    if isinstance(stopped, RewardLate):
        return Failure("timeout", f"no answer after {seconds:g} s; the process was killed")
    return Failure("died", str(stopped))


def _short(answer: Any) -> str:
    text = repr(str(answer.reason) if isinstance(answer, Failure) else answer.get("says", answer))
    return text if len(text) <= 80 else text[:79] + "…"


def _cannot_start(spec: EnvironmentSpec, why: str) -> PlanError:
    return PlanError.of(
        "env-load",
        f"the process of the environment {spec.name} failed to start {TRIES} times in a row: "
        f"{why or f'no answer after {START:g} s'}",
        place=spec.place,
        expected="a process that loads the class and answers",
        remedy=f"import the class in a Python of your own: it has to load within {START:g} s, without ending the "
        "process",
    )
