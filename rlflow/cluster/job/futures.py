"""Wait for several calls of a job.

``gather`` returns all results. ``wait`` separates the calls that have ended from those that haven't.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, TypeVar, overload

from rlflow.cluster.rpc.pool import SECONDS, Future

T1 = TypeVar("T1")
T2 = TypeVar("T2")
T3 = TypeVar("T3")
T4 = TypeVar("T4")


@overload
def gather(first: Future[T1], /, *, seconds: float = ...) -> tuple[T1]: ...
@overload
def gather(first: Future[T1], second: Future[T2], /, *, seconds: float = ...) -> tuple[T1, T2]: ...
@overload
def gather(
    first: Future[T1], second: Future[T2], third: Future[T3], /, *, seconds: float = ...
) -> tuple[T1, T2, T3]: ...
@overload
def gather(
    first: Future[T1], second: Future[T2], third: Future[T3], fourth: Future[T4], /, *, seconds: float = ...
) -> tuple[T1, T2, T3, T4]: ...
@overload
def gather(*futures: Future[Any], seconds: float = ...) -> tuple[Any, ...]: ...


def gather(*futures: Future[Any], seconds: float = SECONDS) -> tuple[Any, ...]:
    """Wait for all calls, and return their results in the order of the futures.

    ``seconds``: a common deadline for all calls, counted from now, in place of their own. If a call fails,
    its error is raised, as in ``Future.result``. If the deadline passes, the error names all late ranks.
    """
    if not futures:
        return ()
    return Future.of_all(futures, seconds).result()


def wait(
    futures: Sequence[Future[Any]], *, seconds: float = SECONDS, count: int | None = None
) -> tuple[list[Future[Any]], list[Future[Any]]]:
    """Wait for calls to end. Return two lists: the futures that have ended, and those that haven't.

    A future has ended if all its answers have arrived or it has an error. This returns once ``count`` futures
    have ended (by default all of them), or after ``seconds``. It doesn't raise the calls' errors;
    ``Future.result`` does.
    """
    enough, limit = len(futures) if count is None else count, time.monotonic() + seconds
    while True:
        # check all at once: a future that completes between two checks would be in neither list
        missing = _missing(futures)
        done = [future for future in futures if missing.isdisjoint(future.refs)]
        left = limit - time.monotonic()
        if len(done) >= min(enough, len(futures)) or left <= 0:
            return done, [future for future in futures if future not in done]
        futures[0].transport.ready(list(missing), left, first=True)


def _missing(futures: Sequence[Future[Any]]) -> set[Any]:
    """Return the references in the futures for which no answer has arrived yet."""
    refs = list(dict.fromkeys(itertools.chain.from_iterable(future.refs for future in futures)))
    return set(refs).difference(futures[0].transport.ready(refs, 0.0)) if refs else set()
