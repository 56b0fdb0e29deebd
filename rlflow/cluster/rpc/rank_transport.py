"""RankTransport: how the calls of a pool reach its ranks, and how the answers return.

There are two transports: Ray's actors (`rlflow.cluster.rpc.actor`), and threads of this process
(`rlflow.cluster.rpc.thread_pool`). To call a rank, a transport starts a method of the rank's ``Host``. It
returns a reference to the answer, which may still be computed. The type of a reference depends on the
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
    """One of the awaited answers is an error. ``RankTransport.error`` returns this error."""


class Gone(Exception):
    """The rank of a call has ended, so its answer will not come."""


class RankTransport(Protocol):
    """Starts calls on ranks, and waits for their answers."""

    def starter(self, rank: Any, method: str, group: str, answers: Answers) -> Callable[..., Any]:
        """Return a function that starts ``method`` on a rank, in the threads of ``group``.

        The function takes the method's arguments. It returns one reference, or a list of ``answers``
        references, or for "streaming" an iterator over references. The rank gets references in the arguments
        as their values.
        """

    def ready(self, refs: Sequence[Any], seconds: float, first: bool = False) -> list[Any]:
        """Wait up to ``seconds`` for all answers, or with ``first`` for one answer.

        Returns the references whose answers have arrived. An iterator over references counts as arrived when
        its next answer has arrived.
        """

    def values(self, refs: Sequence[Any], seconds: float) -> list[Any] | None:
        """Return the answers, or None if not all arrive within ``seconds``.

        Raises CallFailed as soon as one answer is an error.
        """

    def error(self, ref: Any) -> BaseException | None:
        """Return the error that a call raised; None if it returned a value. The answer must have arrived.

        If the rank has ended, the error is Gone.
        """

    def keep(self, value: Any) -> Any:
        """Store a value, and return a reference to it that several calls can use as an argument."""

    def future(self, ref: Any) -> Future[Any]:
        """Return a Future that gets the answer to which ``ref`` refers."""


def is_answered(transport: RankTransport, refs: Sequence[Any]) -> bool:
    """Return whether all answers have arrived, without waiting."""
    return len(transport.ready(refs, 0.0)) == len(refs) if refs else True
