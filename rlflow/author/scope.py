"""Scope: the object that receives the calls of a flow. A tracer records the calls, and a session runs them.

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
# ways to make a follow-up prompt: from a string, from a string after the sampled ids, from the first sampled
# ids
AskWay = Literal["text", "after", "until"]


class Scope(Protocol):
    """The object that receives a flow's calls to stages, `repeat`, `ask`, `choose` and `concat`.

    A scope is a tracer, which records the calls, or a session, which runs them. Method calls of roles go to
    the role objects instead.
    """

    def stage(self, stage: Stage, batch: Any, gives: tuple[str, ...] | None, settings: dict[str, Any]) -> Any:
        """Call a stage on a batch. ``gives``: new names for its output columns."""

    def repeat(self, body: Callable[..., Any], prompts: Any, groups: int, tries: int) -> Any:
        """Call ``body`` with new prompts until ``groups`` groups are kept, at most ``tries`` times."""

    def ask(self, batch: Any, column: str, way: AskWay) -> Any:
        """Return follow-up prompts made from the rows of ``batch``.

        ``way`` says how the prompt uses ``column``.
        """

    def choose(self, batch: Any, column: str, settings: ChooseOptions) -> Any:
        """Return the rows that ``settings`` select by the values of ``column``."""

    def concat(self, batches: Sequence[Any]) -> Any:
        """Return one batch with the rows of all batches."""

    def number(self, name: str) -> Any:
        """Return the scalar ``name`` that every real batch of the flow has; None if there is none."""


class Interpreter(Protocol):
    """Runs flows and stages that user code calls like functions."""

    def call(self, flow: Any, prompts: Any, roles: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Run one iteration of ``flow``. Inside another flow, the calls of ``flow`` become part of that flow."""

    def bare(self) -> Scope:
        """Return the scope for stages that are called outside any flow."""


@dataclass(frozen=True)
class Engines:
    """Functions that load the interpreter and the tracer of flows.

    The interpreter and the tracer import this package, so this package cannot import them. `rlflow` registers
    them here, and each is loaded at its first use.
    """

    interpreter: Callable[[], Interpreter]
    # loads the tracer: returns a function (flow, settings) → the compiled flow, which has a graph
    tracer: Callable[[], Callable[[Any, Any], Any]]
    exports: tuple[str, ...]  # the names that algorithms may import from rlflow


_engines: list[Engines] = []


def register(engines: Engines) -> None:
    """Set the functions that load the interpreter and the tracer."""
    _engines[:] = [engines]


def engines() -> Engines:
    """Return the registered functions that load the interpreter and the tracer."""
    return _engines[0]


_current: ContextVar[Scope | None] = ContextVar("scope", default=None)


def current() -> Scope:
    """Return the scope of the flow that is running; outside any flow, a scope that runs stages at once."""
    return _current.get() or engines().interpreter().bare()


def entered(scope: Scope) -> AbstractContextManager[None]:
    """Send the flow's calls inside the ``with`` block to this scope.

    These are the calls of stages, `repeat`, `ask`, `choose` and `concat`.
    """
    return with_value(_current, scope)


@contextlib.contextmanager
def with_value(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set a context variable to ``value`` inside the ``with`` block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def number(name: str) -> Any:
    """Return the scalar ``name`` that every batch of the running flow has, such as ``iteration``.

    Returns None if there is no such scalar.
    """
    scope = _current.get()
    return scope.number(name) if scope is not None else None


def batch_like(value: Any) -> bool:
    """Return True if ``value`` is a batch, real or symbolic."""
    return hasattr(type(value), "columns") and hasattr(type(value), "rename")


def symbolic(value: Any) -> bool:
    """Return True if ``value`` is a symbol: it stands for a value that is unknown while a flow is traced."""
    return getattr(type(value), "symbolic", False) is True
