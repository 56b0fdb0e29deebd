"""Wait for several calls of a job.

``gather`` returns all results. ``wait`` returns the calls that have ended, and the others.
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

    ``seconds``: one deadline for all calls together, counted from now. It replaces the deadlines of the
    calls. If a call fails, its error is raised, as by ``Future.result``. If the deadline passes, the error
    names all late ranks.
    """
    if not futures:
        return ()
    return Future.of_all(futures, seconds).result()


def wait(
    futures: Sequence[Future[Any]], *, seconds: float = SECONDS, count: int | None = None
) -> tuple[list[Future[Any]], list[Future[Any]]]:
    """Wait until calls end. Return two lists: the futures that have ended, and the futures that have not.

    A future has ended if all its answers have arrived, or if it has an error. The function returns when
    ``count`` futures have ended (None: all of them), or after ``seconds``. It does not raise a call's error;
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
    """Return the references of the futures for which no answer has arrived yet."""
    refs = list(dict.fromkeys(itertools.chain.from_iterable(future.refs for future in futures)))
    return set(refs).difference(futures[0].transport.ready(refs, 0.0)) if refs else set()
