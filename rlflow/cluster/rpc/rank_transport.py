"""RankTransport: how a pool's calls reach its ranks, and how the answers come back.

There are two transports: Ray's actors (`rlflow.cluster.rpc.actor`), and threads of this process
(`rlflow.cluster.rpc.thread_pool`). A transport starts a method of a rank's ``Host`` and returns a reference.
A reference stands for an answer that may still be computed; its type depends on the transport.
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
    """One of the awaited answers is an error; ``RankTransport.error`` returns it."""


class Gone(Exception):
    """The rank that should answer has ended."""


class RankTransport(Protocol):
    """Starts calls of ranks and waits for their answers."""

    def starter(self, rank: Any, method: str, group: str, answers: Answers) -> Callable[..., Any]:
        """Return a function that starts a method of a rank with its arguments, in the threads of ``group``.

        The function returns the reference of the answer. For several answers it returns a list of references,
        and for ``streaming`` an iterator over references. References in the arguments arrive as their values.
        """

    def ready(self, refs: Sequence[Any], seconds: float, first: bool = False) -> list[Any]:
        """Wait up to ``seconds`` for the answers of all references, or with ``first`` for one answer.

        Returns the references that have answers. An iterator over references counts as answered when its next
        reference has its answer.
        """

    def values(self, refs: Sequence[Any], seconds: float) -> list[Any] | None:
        """Return the answers, or None if not all arrive within ``seconds``.

        Raises CallFailed as soon as an answer is an error.
        """

    def error(self, ref: Any) -> BaseException | None:
        """Return the error in an answer that has arrived; None if the answer is a value.

        If the rank has ended, the error is Gone.
        """

    def keep(self, value: Any) -> Any:
        """Store a value and return a reference to it, which can be passed to several calls."""

    def future(self, ref: Any) -> Future[Any]:
        """Return a future that ends when the answer of a reference arrives."""


def is_answered(transport: RankTransport, refs: Sequence[Any]) -> bool:
    """Whether all answers have arrived."""
    return len(transport.ready(refs, 0.0)) == len(refs) if refs else True
