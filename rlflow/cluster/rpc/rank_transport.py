"""RankTransport: how a pool's calls reach its ranks, and how the answers come back.

There are two transports: Ray's actors (`rlflow.cluster.rpc.actor`), and threads of this process
(`rlflow.cluster.rpc.thread_pool`). To call a rank, a transport starts a method of the rank's ``Host`` and
returns a reference to the answer, which may still be in the making. What a reference is depends on the
transport.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Protocol

# group of calls → number of threads on each rank; model calls run one at a time
GROUPS = {"model": 1, "cpu": 2, "io": 4, "control": 2, "beat": 1}
# number of answers to a call; streaming: any number, one after another
Answers = int | Literal["streaming"]


class CallFailed(Exception):
    """One of the awaited answers is an error, which ``RankTransport.error`` returns."""


class Gone(Exception):
    """The called rank has ended, so it will never answer."""


class RankTransport(Protocol):
    """Starts calls on ranks, and waits for their answers."""

    def starter(self, rank: Any, method: str, group: str, answers: Answers) -> Callable[..., Any]:
        """Return a function that starts ``method`` on a rank, in one of the threads of ``group``.

        The function takes the method's arguments. It returns one reference, a list of ``answers`` references
        or, if ``answers`` is "streaming", an iterator over references. References among the arguments reach
        the rank as their values.
        """

    def ready(self, refs: Sequence[Any], seconds: float, first: bool = False) -> list[Any]:
        """Wait up to ``seconds`` for all answers, or for just one if ``first`` is true.

        Returns the references whose answers have arrived. For an iterator over references, it's the next
        answer that counts.
        """

    def values(self, refs: Sequence[Any], seconds: float) -> list[Any] | None:
        """Return the answers, or None if not all arrive within ``seconds``.

        Raises CallFailed as soon as one answer is an error.
        """

    def error(self, ref: Any) -> BaseException | None:
        """Return the error that a call raised, or None if there was none. The answer must have arrived.

        If the rank has ended, the error is Gone.
        """

    def keep(self, value: Any) -> Any:
        """Store a value, and return a reference to it that can be an argument of several calls."""

    def future(self, ref: Any) -> Future[Any]:
        """Return a Future for the answer that ``ref`` refers to."""


def is_answered(transport: RankTransport, refs: Sequence[Any]) -> bool:
    """Return whether all answers have arrived, without waiting."""
    return len(transport.ready(refs, 0.0)) == len(refs) if refs else True
