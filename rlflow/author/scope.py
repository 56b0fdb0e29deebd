"""Who answers the calls in a flow: a tracer that records them, a session that runs them, or nobody but the
stages themselves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from rlflow.author.node_options import ChooseOptions
    from rlflow.author.stage import Stage

T = TypeVar("T")
# a text as a prompt, a text after the sampled ids, or a beginning of the sampled ids
AskWay = Literal["text", "after", "until"]


class Scope(Protocol):
    """The receiver of a flow's calls of stages, `repeat`, `ask`, `choose` and `concat`: a tracer, or a
    session that runs them. Verbs of roles go to the role objects."""

    def stage(self, stage: Stage, batch: Any, gives: tuple[str, ...] | None, settings: dict[str, Any]) -> Any:
        """Call a stage on a batch. ``gives``: new names of its columns."""

    def repeat(self, body: Callable[..., Any], prompts: Any, groups: int, tries: int) -> Any:
        """Call ``body`` on fresh prompts until ``groups`` groups are kept, at most ``tries`` times."""

    def ask(self, batch: Any, column: str, way: AskWay) -> Any:
        """Make a prompt of every row, in one of three ways."""

    def choose(self, batch: Any, column: str, settings: ChooseOptions) -> Any:
        """Keep rows by a column."""

    def concat(self, batches: Sequence[Any]) -> Any:
        """Join rows of several batches."""

    def number(self, name: str) -> Any:
        """The scalar of this name that every batch has, on real batches; None where there is none."""


class Interpreter(Protocol):
    """What runs flows and stages that are called as functions."""

    def call(self, flow: Any, prompts: Any, roles: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """One eager iteration; inside another flow, that flow's lines."""

    def bare(self) -> Scope:
        """The scope of stages that are called outside any flow."""


@dataclass(frozen=True)
class Engines:
    """How to load what runs and what traces flows. Both are built on this package, so `rlflow` says it; each
    is loaded when it is needed."""

    interpreter: Callable[[], Interpreter]
    # gives: (flow, settings) → its compiled form, which has a graph
    tracer: Callable[[], Callable[[Any, Any], Any]]
    exports: tuple[str, ...]  # the names that algorithms may import from rlflow


_engines: list[Engines] = []


def register(engines: Engines) -> None:
    """Say how engines are loaded."""
    _engines[:] = [engines]


def engines() -> Engines:
    """The engines that were registered."""
    return _engines[0]


_current: ContextVar[Scope | None] = ContextVar("scope", default=None)


def current() -> Scope:
    """The scope of the flow that is being called; outside any flow, one that runs stages at once."""
    return _current.get() or engines().interpreter().bare()


def entered(scope: Scope) -> AbstractContextManager[None]:
    """Send calls inside the ``with`` block to this scope."""
    return with_value(_current, scope)


@contextlib.contextmanager
def with_value(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a context variable this value inside the ``with`` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def number(name: str) -> Any:
    """The scalar of this name that every batch of the flow that is being called has; None where there is
    none."""
    scope = _current.get()
    return scope.number(name) if scope is not None else None


def batch_like(value: Any) -> bool:
    """Whether a value is a batch, real or symbolic."""
    return hasattr(type(value), "columns") and hasattr(type(value), "rename")


def symbolic(value: Any) -> bool:
    """Whether a value stands for one that is not known while a flow is traced."""
    return getattr(type(value), "symbolic", False) is True
