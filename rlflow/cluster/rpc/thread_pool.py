"""The transport of pools whose ranks are threads of this process.

It's for debugging, for runs without Ray, and for tests. A rank has the same host and the same groups of
threads as a Ray actor. Arguments and answers pass between threads as bytes, and each reader decodes its own
copy, so threads share no tensors.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import contextvars
import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rlflow.cluster.rpc import replies
from rlflow.cluster.rpc.host import Host
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.rank_transport import GROUPS, Answers, CallFailed
from rlflow.execution.queues import Queues
from rlflow.processes.watchdog import beside

# a reply, which each reader decodes for itself; this future is never cancelled and never has an exception
Reference = Future[bytes]
CLOSED_SECONDS = 5.0  # time limit for the threads of all ranks to end


class ThreadHost(Host):
    """The host of a rank in threads of this process. It reports running nodes to the process's watchdog."""

    @contextlib.contextmanager
    def _contained(self) -> Iterator[None]:
        with contextlib.ExitStack() as within:
            for watchdog_process in tuple(beside.watched):
                within.enter_context(watchdog_process.heartbeat_page.within())
            within.enter_context(super()._contained())
            yield


@dataclass
class ThreadRank:
    """A rank: its host, and the threads that run its calls."""

    host: Host = field(default_factory=ThreadHost)
    queues: Queues = field(default_factory=lambda: Queues(GROUPS))

    def submit(self, group: str, job: Callable[[], None]) -> None:
        """Run a job in one of the threads of a group, without the caller's context variables."""
        contextvars.Context().run(self.queues.submit, group, job)


class AnswerStream(Iterator[Reference]):
    """References to the answers of one call that is answered several times."""

    def __init__(self) -> None:
        self._coming: deque[Reference] = deque([Future()])
        self._lock = threading.Lock()

    @property
    def head(self) -> Reference:
        """A reference to the next answer."""
        with self._lock:
            return self._coming[0]

    def __next__(self) -> Reference:
        with self._lock:
            return self._coming.popleft()

    def put(self, reply: bytes) -> None:
        """Add the reply with the next answer."""
        with self._lock:
            answer = self._coming[-1]
            self._coming.append(Future())
        answer.set_result(reply)


class ThreadTransport:
    """Calls hosts in threads of this process."""

    def starter(self, rank: ThreadRank, method: str, group: str, answers: Answers) -> Callable[..., Any]:
        """Return a function that starts ``method`` on a rank. See ``RankTransport.starter``."""
        call = getattr(rank.host, method)
        if answers == "streaming":
            return partial(_streamed, rank, group, call)
        return partial(_started, rank, group, call, answers)

    def ready(self, refs: Sequence[Any], seconds: float, first: bool = False) -> list[Any]:
        """Wait up to ``seconds`` for all answers, or for just one if ``first`` is true.

        Returns the references whose answers have arrived.
        """
        heads = [ref.head if isinstance(ref, AnswerStream) else ref for ref in refs]
        when = concurrent.futures.FIRST_COMPLETED if first else concurrent.futures.ALL_COMPLETED
        concurrent.futures.wait(heads, max(seconds, 0.0), when)
        return [ref for ref, head in zip(refs, heads, strict=True) if head.done()]

    def values(self, refs: Sequence[Reference], seconds: float) -> list[Any] | None:
        """Wait for all answers and return them, or None if they don't arrive within ``seconds``.

        Raises CallFailed if an answer is an error.
        """
        answered = self.ready(refs, seconds)
        if any(replies.raised(ref.result()) for ref in answered):
            raise CallFailed
        return [replies.content(ref.result()) for ref in refs] if len(answered) == len(refs) else None

    def error(self, ref: Reference) -> BaseException | None:
        """Return the error that a call raised, or None if there was none. The answer must have arrived."""
        reply = ref.result()
        return replies.content(reply) if replies.raised(reply) else None

    def keep(self, value: Any) -> Reference:
        """Store a value, and return a reference to it."""
        kept: Reference = Future()
        kept.set_result(replies.of_answer(value))
        return kept

    def future(self, ref: Reference) -> Future[Any]:
        """Return a Future for the answer that ``ref`` refers to."""
        decoded: Future[Any] = Future()
        ref.add_done_callback(partial(_decode, decoded))
        return decoded


def _decode(into: Future[Any], ref: Reference) -> None:
    content = replies.content(ref.result())
    into.set_exception(content) if replies.raised(ref.result()) else into.set_result(content)


def _started(rank: ThreadRank, group: str, call: Callable[..., Any], answers: int, *args: Any) -> Any:
    """Start a call that returns once. Return its reference, or a list of ``answers`` references."""
    sent = _sent(args)
    refs: list[Reference] = [Future() for _ in range(answers)]

    def job() -> None:
        whole = replies.reply(lambda: call(*_arrived(sent)))
        for ref, part in zip(refs, [whole] if answers == 1 else _parts(whole, answers), strict=True):
            ref.set_result(part)

    rank.submit(group, job)
    return refs[0] if answers == 1 else refs


def _parts(reply: bytes, count: int) -> list[bytes]:
    """Return a reply for each of an answer's ``count`` parts. An error becomes the reply for every part."""
    return (
        [reply] * count
        if replies.raised(reply)
        else [replies.of_answer(part) for part in replies.content(reply)]
    )


def _streamed(rank: ThreadRank, group: str, call: Callable[..., Iterator[Any]], *args: Any) -> AnswerStream:
    """Start a call that is answered several times, and return the stream of its answers."""
    sent, stream = _sent(args), AnswerStream()

    def job() -> None:
        try:
            for answer in call(*_arrived(sent)):
                stream.put(replies.of_answer(answer))
        except Exception as error:
            stream.put(replies.of_error(error))

    rank.submit(group, job)
    return stream


def _sent(args: Sequence[Any]) -> list[Reference | bytes]:
    """Convert arguments to the form in which they are sent: values as bytes, references as they are."""
    return [arg if isinstance(arg, Future) else replies.of_answer(arg) for arg in args]


def _arrived(sent: Sequence[Reference | bytes]) -> list[Any]:
    """Wait for references, and return the arguments as the rank gets them.

    If a referenced answer is an error, that error is raised.
    """
    found = []
    for one in sent:
        reply = one if isinstance(one, bytes) else one.result()
        if replies.raised(reply):
            raise replies.content(reply)
        found.append(replies.content(reply))
    return found


def thread_pool(name: str, ranks: int) -> Pool[Any]:
    """Return a pool of ``ranks`` ranks in threads of this process. They have no objects yet."""
    return Pool(name, [ThreadRank() for _ in range(ranks)], ThreadTransport())


def make(pool: Pool[Any], kind: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Start creating ``kind(*arguments[rank])`` on each rank. ``Pool.made`` waits for the objects.

    The ranks get the arguments themselves, not copies.
    """
    pool.making = [
        _made(member, partial(member.host.make, kind, *own))
        for member, own in zip(pool.actors, arguments, strict=True)
    ]


def _made(member: ThreadRank, call: Callable[[], None]) -> Reference:
    made: Reference = Future()
    member.submit("model", lambda: made.set_result(replies.reply(call)))
    return made


def close(*pools: Pool[Any], seconds: float = CLOSED_SECONDS) -> bool:
    """End the threads of pools. Return whether they all ended within ``seconds``.

    The thread of a call that never returns ends only with this process.
    """
    queues, limit = [member.queues for pool in pools for member in pool.actors], time.monotonic() + seconds
    for each in queues:
        each.close(0.0)  # signal all threads before waiting for any
    ended = [each.close(max(limit - time.monotonic(), 0.0)) for each in queues]
    return all(ended)


def forget(*pools: Pool[Any]) -> None:
    """Drop the objects of all ranks, and with them their torch groups.

    A rank waiting for another one in such a group then stops waiting.
    """
    for member in (member for pool in pools for member in pool.actors):
        member.host.instance = None
    gc.collect()
