"""RankTransport: how a pool's calls reach its ranks and how their answers come back. There are two: Ray's
actors (`rlflow.cluster.rpc.actor`), and threads of this process (`rlflow.cluster.rpc.thread_pool`).

A transport starts a method of a rank's ``Host`` and gives a reference, which stands for an answer that may
still be computed. What a reference is depends on the transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

# group of calls → threads of each rank: models run one call at a time
GROUPS = {"model": 1, "cpu": 2, "io": 4, "control": 2, "beat": 1}
# how many answers a call has; streaming: one after another, as many as come
Answers = int | Literal["streaming"]


class CallFailed(Exception):
    """One of the answers that were waited for is an error; ``RankTransport.error`` has it."""


class Gone(Exception):
    """The rank that should answer is no longer there."""


class RankTransport(Protocol):
    """Starts calls of ranks and waits for their answers."""

    def starter(self, rank: Any, method: str, group: str, answers: Answers) -> Callable[..., Any]:
        """A function that starts a method of a rank with its arguments, in the threads of ``group``. It gives
        the reference of the answer, a list of references for several answers, an iterator over references for
        ``streaming``. References among the arguments arrive as their values."""

    def ready(self, refs: Sequence[Any], seconds: float, first: bool = False) -> list[Any]:
        """Wait for at most ``seconds`` until all references have their answers, with ``first`` until one has.
        Gives those that have. An iterator over references has its answer when its next one has come."""

    def values(self, refs: Sequence[Any], seconds: float) -> list[Any] | None:
        """The answers, or None where not all come within ``seconds``. Raises CallFailed as soon as one is an
        error."""

    def error(self, ref: Any) -> BaseException | None:
        """The error of an answer that has come, Gone where its rank is gone; None where it is a value."""

    def keep(self, value: Any) -> Any:
        """A reference of a value, to be an argument of several calls."""

    def future(self, ref: Any) -> Future[Any]:
        """A future that ends with the answer of a reference."""


def is_answered(transport: RankTransport, refs: Sequence[Any]) -> bool:
    """Whether all answers have come."""
    return len(transport.ready(refs, 0.0)) == len(refs) if refs else True
