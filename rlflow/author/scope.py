"""The receiver of a flow's calls: a tracer records them, a session runs them.

Outside a flow, stages run at once.
"""

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
# ways to make a follow-up prompt: from a text, from a text after the sampled ids, from the first sampled ids
AskWay = Literal["text", "after", "until"]


class Scope(Protocol):
    """The receiver of a flow's calls to stages, `repeat`, `ask`, `choose` and `concat`.

    A scope is a tracer, or a session that runs the calls. Method calls of roles go to the role objects
    instead.
    """

    def stage(self, stage: Stage, batch: Any, gives: tuple[str, ...] | None, settings: dict[str, Any]) -> Any:
        """Call a stage on a batch. ``gives``: new names for its output columns."""

    def repeat(self, body: Callable[..., Any], prompts: Any, groups: int, tries: int) -> Any:
        """Call ``body`` on fresh prompts until ``groups`` groups are kept, at most ``tries`` times."""

    def ask(self, batch: Any, column: str, way: AskWay) -> Any:
        """Make a follow-up prompt from each row, in one of three ways."""

    def choose(self, batch: Any, column: str, settings: ChooseOptions) -> Any:
        """Keep rows by a column."""

    def concat(self, batches: Sequence[Any]) -> Any:
        """Join rows of several batches."""

    def number(self, name: str) -> Any:
        """Return the scalar of this name that every real batch has, or None."""


class Interpreter(Protocol):
    """Runs flows and stages that are called as functions."""

    def call(self, flow: Any, prompts: Any, roles: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Run one eager iteration. Inside another flow, run this flow's lines as a part of that flow."""

    def bare(self) -> Scope:
        """Return the scope for stages that are called outside every flow."""


@dataclass(frozen=True)
class Engines:
    """How to load the interpreter and the tracer of flows.

    The interpreter and the tracer depend on this package, so `rlflow` registers them here. Each is loaded at
    its first use.
    """

    interpreter: Callable[[], Interpreter]
    # loads the tracer: returns a function (flow, settings) → the compiled flow, which has a graph
    tracer: Callable[[], Callable[[Any, Any], Any]]
    exports: tuple[str, ...]  # the names that algorithms may import from rlflow


_engines: list[Engines] = []


def register(engines: Engines) -> None:
    """Set how the interpreter and the tracer are loaded."""
    _engines[:] = [engines]


def engines() -> Engines:
    """Return the registered engines."""
    return _engines[0]


_current: ContextVar[Scope | None] = ContextVar("scope", default=None)


def current() -> Scope:
    """Return the scope of the flow that is being called; outside any flow, a scope that runs stages at once."""
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
    """Return the scalar of this name that every batch of the current flow has, or None."""
    scope = _current.get()
    return scope.number(name) if scope is not None else None


def batch_like(value: Any) -> bool:
    """Return True if a value is a batch, real or symbolic."""
    return hasattr(type(value), "columns") and hasattr(type(value), "rename")


def symbolic(value: Any) -> bool:
    """Return True if a value is symbolic: it stands for a value that is unknown while a flow is traced."""
    return getattr(type(value), "symbolic", False) is True
