"""Group: the ranks of a role, and type-checked calls to them.

Type checkers know the role's class, its methods, and their arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeVar,
    TypeVarTuple,
    overload,
)

from rlflow.author.source_lines import call_place, definition_place
from rlflow.errors import FlowError, Problem, listed, nearest

if TYPE_CHECKING:
    from rlflow.author.batch import Batch
    from rlflow.cluster.rpc.pool import Future, Pool

W = TypeVar("W")
A = TypeVar("A")
R = TypeVar("R")
P = ParamSpec("P")
Ts = TypeVarTuple("Ts")

SECONDS = 300.0  # default deadline of a call
GROUP = "model"  # the one thread of a rank that runs the user's methods


class Workers(Protocol):
    """What a group needs from its job: the pools of its roles."""

    def pool(self, role: str) -> Pool[Any]:
        """Return a role's pool. Raises FlowError before the job has started and after it has ended."""


@dataclass(frozen=True)
class Group(Generic[W]):
    """The ranks of a role, which are objects of the class ``kind``.

    Every call returns a future immediately. Each rank runs its calls one at a time, in the order they were
    made, while different ranks and roles run in parallel. An invalid call raises FlowError on the line that
    makes it, before anything is sent. Every call accepts ``seconds``, a deadline that replaces the group's.
    """

    job: Workers
    role: str
    kind: type[W]
    ranks: int
    distributed: bool = False
    seconds: float = SECONDS
    by_group: bool = False  # whether rows of one group stay on one rank

    def options(self, *, seconds: float | None = None, by_group: bool | None = None) -> Group[W]:
        """Return a copy of the group with some options changed. Options that are None keep their value.

        ``seconds``: the deadline of calls. ``by_group``: whether ``call_batch`` sends all rows of a group to
        the same rank.
        """
        return replace(
            self,
            seconds=self.seconds if seconds is None else seconds,
            by_group=self.by_group if by_group is None else by_group,
        )

    def __len__(self) -> int:
        return self.ranks

    def __repr__(self) -> str:
        return (
            f"Group({self.role}: {self.ranks} {'rank' if self.ranks == 1 else 'ranks'} of "
            f"{self.kind.__name__})"
        )

    @overload
    def call(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **keywords: P.kwargs
    ) -> Future[list[R]]: ...

    @overload
    def call(self, method: Callable[[W, *Ts], R], /, *args: *Ts, seconds: float) -> Future[list[R]]: ...

    def call(self, method: Any, /, *args: Any, **keywords: Any) -> Any:  # type: ignore[misc]  # mypy takes *args for the keyword
        """Call a method on every rank, with the same arguments.

        Returns a future for a list with one result per rank, in rank order.
        """
        name, seconds, pool = self._checked(method, args, keywords)
        return pool.future(
            name,
            [(rank, self._sent(pool, rank, name, args, keywords)) for rank in range(len(pool))],
            seconds,
            list,
        )

    @overload
    def call_rank0(
        self, method: Callable[Concatenate[W, P], R], /, *args: P.args, **keywords: P.kwargs
    ) -> Future[R]: ...

    @overload
    def call_rank0(self, method: Callable[[W, *Ts], R], /, *args: *Ts, seconds: float) -> Future[R]: ...

    def call_rank0(self, method: Any, /, *args: Any, **keywords: Any) -> Any:  # type: ignore[misc]  # mypy takes *args for the keyword
        """Call a method on rank 0 only, and return a future for its result."""
        name, seconds, pool = self._checked(method, args, keywords)
        return pool.future(name, [(0, self._sent(pool, 0, name, args, keywords))], seconds, _only)

    def call_each(
        self, method: Callable[[W, A], R], items: Sequence[A], *, seconds: float | None = None
    ) -> Future[list[R]]:
        """Call a method on every rank, where rank k gets ``items[k]``.

        Returns a future for a list with one result per rank, in rank order.
        """
        name, seconds, pool = self._checked(
            method, (None,), {"seconds": self.seconds if seconds is None else seconds}
        )
        if len(items) != self.ranks:
            raise _misuse(
                "job-items",
                f"role '{self.role}' has {self.ranks} ranks, and each takes one item",
                f"{len(items)} items",
                f"{self.ranks} items",
                "use call_batch to split any number of rows over the ranks",
            )
        return pool.future(
            name,
            [(rank, self._sent(pool, rank, name, (item,), {})) for rank, item in enumerate(items)],
            seconds,
            list,
        )

    @overload
    def call_batch(
        self,
        method: Callable[Concatenate[W, Batch, P], Batch],
        batch: Batch,
        /,
        *args: P.args,
        **keywords: P.kwargs,
    ) -> Future[Batch]: ...

    @overload
    def call_batch(
        self, method: Callable[[W, Batch, *Ts], Batch], batch: Batch, /, *args: *Ts, seconds: float
    ) -> Future[Batch]: ...

    def call_batch(self, method: Any, batch: Any, /, *args: Any, **keywords: Any) -> Any:  # type: ignore[misc]
        """Call a method that maps a batch to a batch. Each row goes to exactly one rank.

        Returns a future for one batch, with the rows in their original order. All ranks get the same ``args``
        and ``keywords``. If the role has a torch process group, every rank is called; otherwise, only those
        with rows.
        """
        name, seconds, pool = self._checked(method, (batch, *args), keywords)
        if not hasattr(batch, "axis"):
            raise _misuse(
                "job-batch",
                f"call_batch('{name}') splits the rows of a batch",
                f"a {type(batch).__name__}",
                "a Batch",
                "make a batch of lists with Batch.of(column=[...]), or use call_each to give each rank its own item",
            )
        return pool.spread(
            name,
            batch,
            lambda rank, *rows: pool.send(rank, "on_rows", name, *rows, args, keywords, group=GROUP),
            by_group=self.by_group,
            everyone=self.distributed,
            seconds=seconds,
        )

    def _sent(
        self, pool: Pool[Any], rank: int, name: str, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> Any:
        return pool.send(rank, "invoke", name, args, keywords, group=GROUP)

    def _checked(
        self, method: object, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[str, float, Pool[Any]]:
        """Check a call, and return its method's name, its deadline and the pool.

        ``seconds`` is removed from ``keywords``. Raises FlowError if the role has no such method, if the
        arguments don't fit, or if the job isn't running.
        """
        seconds = keywords.pop("seconds", self.seconds)
        name = method_name(self.kind, self.role, method)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise _misuse(
                "job-seconds",
                f"the deadline of '{name}' is not a number of seconds",
                repr(seconds),
                "a number above 0",
                "if the method itself has a parameter named seconds, pass it by position",
            )
        try:
            inspect.signature(getattr(self.kind, name)).bind(None, *args, **keywords)
        except TypeError as error:
            raise _misuse(
                "job-arguments",
                f"{self.kind.__name__}.{name}: {error}",
                _given(args, keywords),
                f"{name}{inspect.signature(getattr(self.kind, name))}",
                "",
                definition_place(getattr(self.kind, name)),
            ) from None
        return name, float(seconds), self.job.pool(self.role)


def method_name(kind: type, role: str, method: object) -> str:
    """Return the name of ``method``. Raises FlowError if it is not a method of the role's class ``kind``."""
    name = getattr(method, "__name__", "")
    own = sorted(
        each for each in dir(kind) if not each.startswith("_") and inspect.isfunction(getattr(kind, each))
    )
    if inspect.isfunction(method) and name and getattr(kind, name, None) is method:
        return name
    what = (
        f"the text {method!r}"
        if isinstance(method, str)
        else getattr(method, "__qualname__", type(method).__name__)
    )
    close = nearest(method if isinstance(method, str) else name, own)
    raise _misuse(
        "job-method",
        f"role '{role}' has no such method",
        what,
        listed(f"{kind.__name__}.{each}" for each in own),
        f"write {kind.__name__}.{close or (own[0] if own else 'METHOD')}, the function itself",
        nearest_name=close,
    )


def _given(args: Sequence[object], keywords: dict[str, Any]) -> str:
    words = [
        *(type(arg).__name__ for arg in args),
        *(f"{name}={type(value).__name__}" for name, value in keywords.items()),
    ]
    return f"({', '.join(words)})"


def _misuse(
    code: str,
    message: str,
    there: str,
    expected: str,
    remedy: str,
    definition: Any = None,
    nearest_name: str | None = None,
) -> FlowError:
    return FlowError(Problem(code, message, call_place(), definition, there, expected, nearest_name, remedy))


def _only(answers: list[R]) -> R:
    return answers[0]
