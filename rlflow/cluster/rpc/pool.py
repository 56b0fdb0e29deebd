"""A pool: objects of one class, one per rank, and calls to them with deadlines."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.cluster.rpc.host import GENERATION_BYTES
from rlflow.cluster.rpc.rank_transport import Answers, CallFailed, Gone, RankTransport, is_answered
from rlflow.cluster.rpc.replies import content
from rlflow.cluster.rpc.row_messages import RowMailbox, RowMessage
from rlflow.cluster.rpc.sockets import LARGEST, PendingCalls, Sockets
from rlflow.cluster.sharding.gather import gathered
from rlflow.cluster.sharding.shard_map import WorkerId, row_tokens
from rlflow.cluster.sharding.split import balanced, check_counts, merge_order, units_of_rows
from rlflow.errors import Dead, Late, RemoteError, RemoteFailure
from rlflow.execution.wire.column_wire import BatchFrame
from rlflow.processes.deadline import LOOK, Deadline
from rlflow.processes.user_frames import AS_THEY_ARE, RaisedElsewhere

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

SECONDS = 300.0  # default deadline of a call


class Watcher(Protocol):
    """Finds out whether workers are alive. In a run, this is the health monitor."""

    @property
    def verdict(self) -> str | None:
        """Why workers ended, in words, or None while all are alive."""

    def cause(self) -> str | None:
        """Check every worker now. Describe why workers ended, or return None if all are alive.

        Call this after an error, because one worker's error may result from another worker's death.
        """

    def late(self, at: Iterable[WorkerId]) -> str:
        """Describe what these late workers are doing."""


class Future(Generic[R]):
    """The answers of several workers to one call. ``result`` waits for them.

    ``what``: the call's name, for messages. ``at``: the workers. ``refs``: references to their answers, in
    the order of ``at``. ``seconds``: the deadline. ``merge``: a function that turns the list of answers into
    the result. ``watcher``: reports dead workers. ``limit``: a deadline that is already running, used in
    place of ``seconds``.
    """

    def __init__(
        self,
        transport: RankTransport,
        what: str,
        at: Sequence[WorkerId],
        refs: Sequence[Any],
        seconds: float,
        merge: Callable[[list[Any]], R],
        watcher: Watcher | None = None,
        limit: Deadline | None = None,
    ) -> None:
        self.transport = transport
        self.what = what
        self.at = tuple(at)
        self.refs = tuple(refs)
        self.seconds = seconds
        self._merge = _once(merge)
        self._watcher, self._limit = watcher, limit or Deadline(seconds)

    @staticmethod
    def of_all(futures: Sequence[Future[Any]], seconds: float) -> Future[tuple[Any, ...]]:
        """Combine several calls into one future for the tuple of their results, with a deadline of its own.

        There must be at least one call, and none of them may be a short call over sockets.
        """
        ends = list(itertools.accumulate(len(future.refs) for future in futures))

        def merge(answers: list[Any]) -> tuple[Any, ...]:
            return tuple(
                future._merge(answers[end - len(future.refs) : end])
                for future, end in zip(futures, ends, strict=True)
            )

        at = [place for future in futures for place in future.at]
        refs = [ref for future in futures for ref in future.refs]
        what = ", ".join(dict.fromkeys(future.what for future in futures))
        return Future(futures[0].transport, what, at, refs, seconds, merge, futures[0]._watcher)

    def done(self) -> bool:
        """Return whether all answers have arrived, without waiting."""
        return is_answered(self.transport, self.refs)

    def result(self) -> R:
        """Wait for all answers, and return the result. Later calls return the same object.

        If a call fails, raises RemoteError, which names the rank of the first error. At the deadline, raises
        Late, which names the late ranks. Raises Dead as soon as any worker is known to be dead.
        """
        return self._merge(self._answers())

    def _answers(self) -> list[Any]:
        """Wait for the answers, and return them. Raises Dead or Late."""
        while True:
            if self._watcher is not None and self._watcher.verdict is not None:
                raise Dead(self._watcher.verdict)
            seconds = self._limit.left()
            if (answers := self._look(min(max(seconds, 0.0), LOOK))) is not None:
                return answers
            if seconds <= 0:
                raise self._late()

    def _look(self, seconds: float) -> list[Any] | None:
        """Return the answers if all arrive within ``seconds``, else None. Raises a failed call's error."""
        try:
            return self.transport.values(self.refs, seconds)
        except CallFailed:
            raise self._failure() from None

    def _waiting(self) -> list[WorkerId]:
        ready = set(self.transport.ready(self.refs, 0.0))
        return [at for ref, at in zip(self.refs, self.at, strict=True) if ref not in ready]

    def _late(self) -> Late:
        waiting = self._waiting()
        doing = self._watcher.late(waiting) if self._watcher is not None else ""
        return Late(
            f"no answer to '{self.what}' from {', '.join(map(str, waiting))} after {self.seconds:g} s{doing}"
        )

    def _failure(self) -> BaseException:
        ready = self.transport.ready(self.refs, 0.0)
        return self._chosen_error(
            [
                (at, error)
                for ref, at in zip(self.refs, self.at, strict=True)
                if ref in ready and (error := self.transport.error(ref)) is not None
            ]
        )

    def _chosen_error(self, failed: Sequence[tuple[WorkerId, BaseException]]) -> BaseException:
        """Return the error to raise after a failure: a worker's death if there is one, or the first error.

        The death comes first, because it may have caused the other errors.
        """
        problem = next((error for _, error in failed if isinstance(error, AS_THEY_ARE)), None)
        if problem is not None:
            return problem
        cause = self._watcher.cause() if self._watcher is not None else None
        return Dead(cause) if cause is not None else translated(failed[0][1], failed[0][0], self.what)


class SocketFuture(Future[R]):
    """The answers of several workers to a short call over sockets.

    ``calls``: the calls in progress, with a connection to each worker in ``at``.
    """

    def __init__(
        self,
        transport: RankTransport,
        what: str,
        at: Sequence[WorkerId],
        calls: PendingCalls,
        seconds: float,
        merge: Callable[[list[Any]], R],
        watcher: Watcher | None,
    ) -> None:
        super().__init__(transport, what, at, (), seconds, merge, watcher)
        self._calls = calls

    def done(self) -> bool:
        """Return whether all answers have arrived, without waiting."""
        self._calls.listen(0.0)
        return not self._calls.waiting

    def result(self) -> R:
        """Wait for all answers, and return the result. Raises the same errors as ``Future.result``.

        Afterwards, the connections are free again.
        """
        try:
            return super().result()
        finally:
            self._calls.close()

    def _look(self, seconds: float) -> list[Any] | None:
        self._calls.listen(seconds)
        if failed := [(at, error) for at in self.at if (error := self._calls.error(at.rank)) is not None]:
            raise self._chosen_error(failed)
        return None if self._calls.waiting else [content(self._calls.replies[at.rank]) for at in self.at]

    def _waiting(self) -> list[WorkerId]:
        return [at for at in self.at if at.rank in self._calls.waiting]


def _once(merge: Callable[[list[Any]], R]) -> Callable[[list[Any]], R]:
    """Return a function that calls ``merge`` the first time, and afterwards returns the same result.

    ``merge`` must run only once, because a frame in shared memory can be read only once.
    """
    results, merging = list[R](), threading.Lock()

    def merged(answers: list[Any]) -> R:
        with merging:
            if not results:
                results.append(merge(answers))
            return results[0]

    return merged


def translated(cause: BaseException, at: WorkerId, what: str) -> RemoteError:
    """Turn an error of the worker ``at`` into a RemoteError that names it, or into Dead if it's lost.

    ``what``: the call's name, for messages.
    """
    if isinstance(cause, Gone):
        return Dead(f"{at} was lost while '{what}' ran there: {str(cause).splitlines()[0]}")
    failure = (
        cause.failure
        if isinstance(cause, RaisedElsewhere)
        else RemoteFailure(type(cause).__name__, str(cause))
    )
    return RemoteError(f"{failure.message} ({at})", failure)


class Pool(Generic[W]):
    """Objects of one class, one on each rank. Ranks are numbered from 0.

    Methods such as ``call`` and ``map`` take a method of the class, or its name. ``ranks``: each rank's
    ``Host``, in the form that ``transport`` calls.
    """

    def __init__(self, name: str, ranks: Sequence[Any], transport: RankTransport) -> None:
        self.name, self.actors, self.transport = name, tuple(ranks), transport
        self.generation = 0  # generation number; increases when earlier calls become void
        self.making: list[Any] = []  # references of answers to the calls that make the objects
        self.watcher: Watcher | None = None
        self.sockets, self.mailbox = Sockets(), RowMailbox()
        self._near: tuple[bool, ...] | None = None
        self._places = tuple(WorkerId(name, rank) for rank in range(len(self.actors)))
        self._starters: dict[tuple[int, str, str, Answers], Callable[..., Any]] = {}

    def __len__(self) -> int:
        return len(self.actors)

    def __repr__(self) -> str:
        return f"Pool({self.name}, {len(self)} ranks)"

    def at(self, rank: int) -> WorkerId:
        """Return the id of the worker on a rank."""
        return self._places[rank]

    def send(self, rank: int, method: str, *args: Any, group: str = "cpu", answers: int = 1) -> Any:
        """Start a method on one rank, and return a reference to its result.

        If ``answers`` is above 1, the method returns that many values, and you get a list of references.
        References in ``args`` reach the rank as their values. ``group``: the worker's thread group that runs
        the method.
        """
        return self._starter(rank, "do", group, answers)(self.generation, method, *args)

    def run(self, rank: int, frame: bytes, transfers: Sequence[Any], group: str) -> Any:
        """Pass a frame to the ``run`` method of one rank's object, and return a reference to the answer.

        ``transfers``: references to rows; the rank gets their values. ``group``: as in ``send``.
        """
        return self._starter(rank, "do_run", group)(self._with_generation(frame), *transfers)

    def run_chunks(self, rank: int, frame: bytes, transfers: Sequence[Any], group: str) -> Any:
        """Pass a frame to the ``run_chunks`` method of one rank's object. Return an iterator over references.

        The iterator yields a reference as soon as its answer is available.
        """
        return self._starter(rank, "do_chunks", group, "streaming")(self._with_generation(frame), *transfers)

    def _with_generation(self, frame: bytes) -> bytes:
        return self.generation.to_bytes(GENERATION_BYTES, "little") + frame

    def _starter(self, rank: int, name: str, group: str, answers: Answers = 1) -> Callable[..., Any]:
        which = (rank, name, group, answers)
        if which not in self._starters:
            self._starters[which] = self.transport.starter(self.actors[rank], name, group, answers)
        return self._starters[which]

    def enter(self, generation: int) -> list[Any]:
        """Start a new generation on every rank, once the model calls in progress have ended.

        Returns references to the ranks' confirmations. From then on, calls from the earlier generation are
        refused.
        """
        self.generation = generation
        return [self._starter(rank, "enter", "model")(generation) for rank in range(len(self))]

    def near(self, rank: int) -> bool:
        """Return whether a rank's worker shares memory with this process. The answer is cached.

        All workers that share memory with this process also share it with each other.
        """
        if self._near is None:
            self._near = self._asked_near()
        return self._near[rank]

    def _asked_near(self) -> tuple[bool, ...]:
        at = self.mailbox.outbox.write(BatchFrame(Batch(Axis.fresh(0), {})))
        if at is None:
            return (False,) * len(self)
        answers = [self._starter(rank, "reaches", "control")(at) for rank in range(len(self))]
        return tuple(self.future("reaches", list(enumerate(answers)), SECONDS, list).result())

    def connect(self) -> None:
        """Close the sockets to the workers on this machine, and open new ones."""
        self.sockets.close()
        self._near = None
        key = secrets.token_bytes(32)
        names = [self._starter(rank, "listen", "control")(key) for rank in range(len(self))]
        self.sockets = Sockets(self.future("listen", list(enumerate(names)), SECONDS, list).result(), key)

    def short_call(self, what: str, frames: Mapping[int, bytes], seconds: float) -> Future[list[Any]] | None:
        """Pass frames to the ``run`` methods of several ranks' objects over sockets.

        ``what``: the call's name, for messages. ``frames``: rank → frame. Returns a future for the answers,
        or None if a frame is too large or a rank has no free connection.
        """
        connections = self.sockets.take(frames) if max(map(len, frames.values())) < LARGEST else None
        if connections is None:
            return None
        calls = PendingCalls(self.sockets, connections)
        for rank, frame in frames.items():
            calls.send(rank, self._with_generation(frame))
        return SocketFuture(
            self.transport, what, [self.at(rank) for rank in frames], calls, seconds, list, self.watcher
        )

    def made(self, seconds: float) -> Future[list[None]]:
        """Return a future that is done once the objects of all ranks have been created.

        If an object couldn't be created, ``result`` raises its error.
        """
        return self.future("the start", list(enumerate(self.making)), seconds, list)

    def take_over(self, other: Pool[W]) -> None:
        """Replace this pool's workers with those of ``other``, a new pool that isn't watched yet."""
        self.sockets.close()
        self.actors = other.actors
        self.making = other.making
        self.generation = other.generation
        self.watcher = None
        self.sockets = other.sockets
        self._starters, self._near = {}, None

    def future(
        self,
        method: str,
        refs: Sequence[tuple[int, Any]],
        seconds: float,
        merge: Callable[[list[Any]], R],
        limit: Deadline | None = None,
    ) -> Future[R]:
        """Return a future for the answers to a call of ``method``.

        ``refs``: the (rank, reference) of each answer. For the other parameters, see ``Future``.
        """
        at, answers = [self.at(rank) for rank, _ in refs], [ref for _, ref in refs]
        return Future(self.transport, method, at, answers, seconds, merge, self.watcher, limit)

    def call(
        self,
        method: Callable[Concatenate[W, P], R] | str,
        *args: Any,
        seconds: float = SECONDS,
        group: str = "cpu",
    ) -> Future[list[R]]:
        """Call a method on every rank, with the same arguments.

        Returns a future for a list with one result per rank, in rank order. ``group``: the worker's thread
        group that runs the method.
        """
        name = _name(method)
        return self.future(
            name,
            [(rank, self.send(rank, name, *args, group=group)) for rank in range(len(self))],
            seconds,
            list,
        )

    def call_batch(
        self,
        method: Callable[[W, Batch], Batch] | str,
        batch: Batch,
        *,
        by_group: bool = False,
        seconds: float = SECONDS,
    ) -> Future[Batch]:
        """Call a method that maps a batch to a batch. Each row goes to exactly one rank.

        Returns a future for one batch, with the rows in their original order. ``by_group``: whether all rows
        of a group go to the same rank. If a rank returns a different number of rows than it got, ``result``
        raises ValueError, which names the rank.
        """
        name = _name(method)
        return self.spread(
            name,
            batch,
            lambda rank, *rows: self._starter(rank, "do_batch", "cpu")(name, *rows),
            by_group=by_group,
            seconds=seconds,
        )

    def spread(
        self,
        what: str,
        batch: Batch,
        ask: Callable[[int, RowMessage, bool], Any],
        *,
        by_group: bool = False,
        everyone: bool = False,
        seconds: float = SECONDS,
    ) -> Future[Batch]:
        """Send each row of a batch to exactly one rank, and return a future for the joined answers.

        ``ask``: a function that starts the call on a rank and returns a reference to the answer. It gets the
        rank, the rank's rows, and whether the rank shares memory with this process. ``by_group``: whether all
        rows of a group go to the same rank. ``everyone``: whether to call ranks without rows as well, because
        the ranks work on the call together.
        """
        units = units_of_rows(batch.axis.slots if by_group else None, len(batch))
        split = balanced(units, row_tokens(batch.data, len(batch)), len(self))
        used = [rank for rank in range(len(self)) if everyone or len(split[rank])] or [0]

        def merge(answers: list[RowMessage]) -> Batch:
            parts = self.mailbox.opened(answers)
            rows_of = dict(zip(used, map(len, parts), strict=True))
            check_counts(split, [rows_of.get(rank, 0) for rank in range(len(self))])
            order = merge_order([split[rank] for rank in used])
            return Batch(
                batch.axis, gathered([(part, None) for part in parts], list(parts[0].data), order).data
            )

        def asked(rank: int) -> Any:
            near = self.near(rank)
            # each rank starts as soon as it has its rows
            return ask(rank, self.mailbox.message(batch, split[rank], shared=near), near)

        return self.future(what, [(rank, asked(rank)) for rank in used], seconds, merge)

    def map(
        self, method: Callable[[W, S], R] | str, items: Iterable[S], *, seconds: float = SECONDS
    ) -> Iterator[R]:
        """Call a method once per item, with the ranks taking turns. Yield the results in item order.

        A result is yielded as soon as it and all earlier ones are there. Each rank works on at most two items
        at a time.
        """
        name, waiting = _name(method), list[Future[R]]()
        for number, item in enumerate(items):
            rank = number % len(self)
            waiting.append(
                self.future(name, [(rank, self.send(rank, name, item))], seconds, lambda answers: answers[0])
            )
            if len(waiting) >= 2 * len(self):
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _name(method: Callable[..., Any] | str) -> str:
    return method if isinstance(method, str) else method.__name__
