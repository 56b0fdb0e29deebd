"""A pool: one object of a class on each of several workers, Ray actors in one placement group; and calls to them with deadlines."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rlflow import own_lines
from rlflow.batch import Batch
from rlflow.cluster.rpc.actor import ERA, Host, Payload, opened, packed
from rlflow.cluster.rpc.sockets import LARGEST, Gone, Lines, PendingCalls, content
from rlflow.cluster.sharding.shard_map import WorkerId, row_tokens
from rlflow.cluster.sharding.split import balanced, check_counts, merge_order, units_of_rows
from rlflow.deadline import LOOK, Deadline
from rlflow.errors import Dead, FlowError, Late, PlanError, RemoteError, SkipIteration, Stopped

W = TypeVar("W")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

SECONDS = 300.0  # how long a call may take where nothing else is said


class Watcher(Protocol):
    """Who knows how the workers are."""

    @property
    def verdict(self) -> str | None:
        """What ended the run on the workers, once it is known."""

    def cause(self) -> str | None:
        """The verdict, after a look at every worker: what has just failed may be no more than what follows from a worker's death."""

    def late(self, at: Iterable[WorkerId]) -> str:
        """What those do who should have answered."""


class Future(Generic[R]):
    """The answers of several workers, in the order of ``at``; ``merge`` makes one result of them."""

    def __init__(
        self, what: str, at: Sequence[WorkerId], refs: Sequence[Any], seconds: float, merge: Callable[[list[Any]], R],
        watcher: Watcher | None = None, limit: Deadline | None = None,
    ) -> None:
        """``limit``: a deadline that began earlier, of which this wait is a part."""
        self.what, self.at, self.refs, self.seconds, self._merge = what, tuple(at), tuple(refs), seconds, merge
        self._watcher, self._limit = watcher, limit or Deadline(seconds)

    def done(self) -> bool:
        return len(ray.wait(list(self.refs), num_returns=len(self.refs), timeout=0)[0]) == len(self.refs) if self.refs else True

    def result(self) -> R:
        """Wait for all, or for the first that fails. Raises RemoteError with the rank, Late with the ranks that have not answered at the
        deadline, and Dead as soon as it is known that a worker is gone, be it another one."""
        return self._merge(self._answers())

    def _answers(self) -> list[Any]:
        """What ``_look`` finds, which each kind of future does in its own way."""
        while True:
            if self._watcher is not None and self._watcher.verdict is not None:
                raise Dead(self._watcher.verdict)
            left = self._limit.left()
            if (answers := self._look(min(max(left, 0.0), LOOK))) is not None:
                return answers
            if left <= 0:
                raise self._late()

    def _look(self, seconds: float) -> list[Any] | None:
        """The answers if they come within so many seconds. Raises what one failed with."""
        try:
            return list(ray.get(list(self.refs), timeout=seconds))
        except GetTimeoutError:
            return None
        except RayError:
            raise self._failure() from None

    def _waiting(self) -> list[WorkerId]:
        ready = set(ray.wait(list(self.refs), num_returns=len(self.refs), timeout=0)[0])
        return [at for ref, at in zip(self.refs, self.at, strict=True) if ref not in ready]

    def _late(self) -> Late:
        waiting = self._waiting()
        doing = self._watcher.late(waiting) if self._watcher is not None else ""
        return Late(f"no answer to '{self.what}' from {', '.join(map(str, waiting))} after {self.seconds:g} s{doing}")

    def _failure(self) -> BaseException:
        ready, _ = ray.wait(list(self.refs), num_returns=len(self.refs), timeout=0)
        return self._judged([(at, error) for ref, at in zip(self.refs, self.at, strict=True)
                             if ref in ready and (error := _error(ref)) is not None])  # fmt: skip

    def _judged(self, failed: Sequence[tuple[WorkerId, BaseException]]) -> BaseException:
        """What the first rank raised that raised anything."""
        problem = next((error for _, error in failed if _passed(error)), None)
        if problem is not None:
            return problem
        cause = self._watcher.cause() if self._watcher is not None else None
        return Dead(cause) if cause is not None else translated(failed[0][1], failed[0][0], self.what)


class SocketFuture(Future[R]):
    """Answers that come over lines, of which ``talk`` has one to each of ``at``."""

    def __init__(
        self, what: str, at: Sequence[WorkerId], talk: PendingCalls, seconds: float, merge: Callable[[list[Any]], R],
        watcher: Watcher | None,
    ) -> None:
        super().__init__(what, at, (), seconds, merge, watcher)
        self._talk = talk

    def done(self) -> bool:
        self._talk.listen(0.0)
        return not self._talk.waiting

    def result(self) -> R:
        try:
            return super().result()
        finally:
            self._talk.close()

    def _look(self, seconds: float) -> list[Any] | None:
        self._talk.listen(seconds)
        if failed := [(at, error) for at in self.at if (error := self._talk.error(at.rank)) is not None]:
            raise self._judged(failed)
        return None if self._talk.waiting else [content(self._talk.heard[at.rank]) for at in self.at]

    def _waiting(self) -> list[WorkerId]:
        return [at for at in self.at if at.rank in self._talk.waiting]


def _error(ref: Any) -> BaseException | None:
    """What an answer that is there is instead."""
    try:
        ray.get(ref, timeout=SECONDS)
    except RayTaskError as error:
        return error.cause or error
    except RayError as error:
        return error
    return None


def _passed(cause: BaseException) -> bool:
    """Whether it says by itself what is wrong and where: problems of the author's, and what the engine knows."""
    return isinstance(cause, FlowError | PlanError | RemoteError | SkipIteration | Stopped)


def translated(cause: BaseException, at: WorkerId, what: str) -> RemoteError:
    """What a worker raised, with the rank."""
    if isinstance(cause, RayActorError | GetTimeoutError | Gone):
        return Dead(f"{at} is gone while '{what}' ran there: {str(cause).splitlines()[0]}")
    remote = RemoteError(f"{own_lines.described(cause)} ({at})")
    own_lines.carry(cause, remote)
    return remote


class Pool(Generic[W]):
    """Objects of one class, one per rank, numbered from 0. ``call`` and its kin take a method of the class, or its name."""

    def __init__(self, name: str, actors: Sequence[Any]) -> None:
        self.name, self.actors = name, tuple(actors)
        self.era = 0  # grows when what the workers were asked before is void
        self.making: list[Any] = []
        self.watcher: Watcher | None = None
        self.lines = Lines()
        self._places = tuple(WorkerId(name, rank) for rank in range(len(self.actors)))
        self._methods: dict[tuple[int, str, str, int | str], Any] = {}

    def __len__(self) -> int:
        return len(self.actors)

    def __repr__(self) -> str:
        return f"Pool({self.name}, {len(self)} ranks)"

    def at(self, rank: int) -> WorkerId:
        return self._places[rank]

    def send(self, rank: int, method: str, *args: Any, group: str = "cpu", answers: int = 1) -> Any:
        """Start a method on one rank; the reference of its result, or of each of its several. References among ``args`` arrive as
        their values."""
        return self._method(rank, "do", group, answers).remote(self.era, method, *args)

    def run(self, rank: int, frame: bytes, transfers: Sequence[Any], group: str) -> Any:
        """Have one rank's object ``run`` a frame; ``transfers``: references, which arrive as their values."""
        return self._method(rank, "do_run", group).remote(self._told(frame), *transfers)

    def run_chunks(self, rank: int, frame: bytes, transfers: Sequence[Any], group: str) -> Any:
        """The same for a frame with several answers; their references, each as soon as it is there."""
        return self._method(rank, "do_chunks", group, "streaming").remote(self._told(frame), *transfers)

    def _told(self, frame: bytes) -> bytes:
        return self.era.to_bytes(ERA, "little") + frame

    def _method(self, rank: int, name: str, group: str, answers: int | str = 1) -> Any:
        which = (rank, name, group, answers)
        if which not in self._methods:
            self._methods[which] = getattr(self.actors[rank], name).options(concurrency_group=group, num_returns=answers)
        return self._methods[which]

    def connect(self) -> None:
        """New lines to the workers on this machine."""
        self.lines.close()
        key = secrets.token_bytes(32)
        names = [actor.listen.options(concurrency_group="control").remote(key) for actor in self.actors]
        self.lines = Lines(self.future("listen", list(enumerate(names)), SECONDS, list).result(), key)

    def talk(self, what: str, frames: Mapping[int, bytes], seconds: float) -> Future[list[Any]] | None:
        """Have each of some ranks ``run`` a frame and answer over a line; None where there is not a line free to each."""
        lines = self.lines.take(frames) if max(map(len, frames.values())) < LARGEST else None
        if lines is None:
            return None
        talk = PendingCalls(self.lines, lines)
        for rank, frame in frames.items():
            talk.say(rank, self._told(frame))
        return SocketFuture(what, [self.at(rank) for rank in frames], talk, seconds, list, self.watcher)

    def made(self, seconds: float) -> Future[list[None]]:
        """The objects are there, or what kept one from being made."""
        return self.future("the start", list(enumerate(self.making)), seconds, list)

    def take_over(self, other: Pool[W]) -> None:
        """Stand for the workers of another pool from now on, which nobody watches yet."""
        self.lines.close()
        self.actors, self.making, self.era, self.watcher, self.lines = other.actors, other.making, other.era, None, other.lines
        self._methods = {}

    def future(
        self, method: str, refs: Sequence[tuple[int, Any]], seconds: float, merge: Callable[[list[Any]], R], limit: Deadline | None = None
    ) -> Future[R]:
        return Future(method, [self.at(rank) for rank, _ in refs], [ref for _, ref in refs], seconds, merge, self.watcher, limit)

    def call(
        self, method: Callable[Concatenate[W, P], R] | str, *args: Any, seconds: float = SECONDS, group: str = "cpu"
    ) -> Future[list[R]]:
        """Every rank, the same arguments; one result per rank, in rank order."""
        name = _name(method)
        return self.future(name, [(rank, self.send(rank, name, *args, group=group)) for rank in range(len(self))], seconds, list)

    def call_batch(
        self, method: Callable[[W, Batch], Batch] | str, batch: Batch, *, by_group: bool = False, seconds: float = SECONDS
    ) -> Future[Batch]:
        """Every row to exactly one rank, any number of rows; results over the rows in their original order.

        Raises ValueError with the rank where a rank gives another number of rows than it got.
        """
        name = _name(method)
        units = units_of_rows(batch.axis.slots if by_group else None, len(batch))
        split = balanced(units, row_tokens(batch.data, len(batch)), len(self))
        used = [rank for rank in range(len(self)) if len(split[rank])] or [0]
        refs = [(rank, self.actors[rank].do_batch.remote(name, packed(batch.rows(split[rank])))) for rank in used]

        def merge(answers: list[Payload]) -> Batch:
            parts = [opened(answer) for answer in answers]
            check_counts([split[rank] for rank in used], [len(part) for part in parts])
            rows = Batch.concat(parts).rows(merge_order([split[rank] for rank in used]))
            return Batch(batch.axis, rows.data)

        return self.future(name, refs, seconds, merge)

    def map(self, method: Callable[[W, S], R] | str, items: Iterable[S], *, seconds: float = SECONDS) -> Iterator[R]:
        """The method over items, each on the next rank; results in the order of the items, each as soon as it and those before it are
        there. At most two items per rank are under way."""
        name, waiting = _name(method), list[Future[R]]()
        for number, item in enumerate(items):
            rank = number % len(self)
            waiting.append(self.future(name, [(rank, self.send(rank, name, item))], seconds, lambda answers: answers[0]))
            if len(waiting) >= 2 * len(self):
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def _name(method: Callable[..., Any] | str) -> str:
    return method if isinstance(method, str) else method.__name__


def make_pool(
    name: str, kind: type[W], ranks: int, arguments: Callable[[int], tuple[Any, ...]], bundles: Any,
    meet: tuple[Any, ...] | None = None, **options: Any,
) -> Pool[W]:
    """Start the objects: ``kind(*arguments(rank))`` on each rank, in the bundles of a placement group. meet: what ``Host.meet`` is asked on
    the first rank; what it answers is a last argument on all. ``Pool.made`` waits for them."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    host: Any = Host
    actors = []
    for rank in range(ranks):
        where = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank) if bundles is not None else "DEFAULT"
        actors.append(host.options(scheduling_strategy=where, **options).remote())
    pool: Pool[W] = Pool(name, actors)
    met = [] if meet is None else [actors[0].meet.options(concurrency_group="control").remote(*meet)]  # Ray waits for it, and hands it on
    pool.making = [actor.make.options(concurrency_group="model").remote(kind, *arguments(rank), *met) for rank, actor in enumerate(actors)]
    return pool
