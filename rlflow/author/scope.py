"""Scope: where a flow's calls go. A tracer records them, and a session runs them.

Outside of flows, stages run right away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    from rlflow.author.node_options import ChooseOptions, ConcatOptions, EncodeOptions
    from rlflow.author.stage import Stage

T = TypeVar("T")
# ways to make a follow-up prompt: from a string, from a string after the sampled ids, from the first sampled
# ids
AskWay = Literal["text", "after", "until"]


class Scope(Protocol):
    """Receives a flow's calls of stages, `repeat`, `ask`, `encode`, `choose` and `concat`.

    It is either a tracer, which records the calls, or a session, which runs them. Methods of roles are called
    on the role objects instead.
    """

    def stage(self, stage: Stage, batch: Any, gives: tuple[str, ...] | None, settings: dict[str, Any]) -> Any:
        """Call a stage on a batch. ``gives``: new names for the columns that it returns."""

    def repeat(self, body: Callable[..., Any], prompts: Any, settings: dict[str, Any]) -> Any:
        """Call ``body`` on new prompts until ``groups`` groups are kept, but at most ``tries`` times.

        ``settings``: ``groups`` and ``tries``, and the schedule (``every`` and ``after``).
        """

    def ask(self, batch: Any, column: str, way: AskWay) -> Any:
        """Make follow-up prompts from the rows of ``batch``. ``way`` says how they use ``column``."""

    def encode(self, batch: Any, column: str, settings: EncodeOptions) -> Any:
        """Make rows whose responses are the texts in ``column``."""

    def choose(self, batch: Any, column: str, settings: ChooseOptions) -> Any:
        """Keep the rows that ``settings`` select by their values in ``column``."""

    def concat(self, batches: Sequence[Any], settings: ConcatOptions) -> Any:
        """Join batches into one. ``settings`` says how the rows form groups, and what to fill columns with."""

    def number(self, name: str) -> Any:
        """Return the scalar ``name`` that every real batch of the flow has, or None."""


class Interpreter(Protocol):
    """Runs flows and stages when user code calls them."""

    def call(self, flow: Any, prompts: Any, roles: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Run one iteration of ``flow``, or inside another flow, add its calls to that flow."""

    def bare(self) -> Scope:
        """Return the scope for stages called outside of flows."""


@dataclass(frozen=True)
class Engines:
    """Functions that load the interpreter and the tracer of flows when first needed.

    Both import this package, so this package can't import them. Instead, `rlflow` registers them here.
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
    """Return the scope of the running flow, or outside of flows, a scope that runs stages right away."""
    return _current.get() or engines().interpreter().bare()


def entered(scope: Scope) -> AbstractContextManager[None]:
    """Send calls of stages, and of functions such as `repeat` and `ask`, in the ``with`` block to this scope."""
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
    """Return a scalar that every batch of the running flow has, such as ``iteration``.

    Returns None if there is no scalar called ``name``.
    """
    scope = _current.get()
    return scope.number(name) if scope is not None else None


def batch_like(value: Any) -> bool:
    """Return True if ``value`` is a real or symbolic batch."""
    return hasattr(type(value), "columns") and hasattr(type(value), "rename")


def symbolic(value: Any) -> bool:
    """Return True if ``value`` is a symbol, which stands for an unknown value while a flow is traced."""
    return getattr(type(value), "symbolic", False) is True
