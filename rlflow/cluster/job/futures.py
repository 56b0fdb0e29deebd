"""Waiting for several calls: ``gather`` for the results of all of them, ``wait`` for those that come by a
deadline."""

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
    """The results of all calls, in the order of the futures. ``seconds``: the deadline of all together, from
    now on, in place of their own. Raises as ``Future.result`` does, for the first call that fails, whichever
    it is, and names all ranks that are late."""
    if not futures:
        return ()
    return Future.of_all(futures, seconds).result()


def wait(
    futures: Sequence[Future[Any]], *, seconds: float = SECONDS, count: int | None = None
) -> tuple[list[Future[Any]], list[Future[Any]]]:
    """The futures whose answers, or errors, have all come, and the others, once ``count`` of them have (None:
    all) or after ``seconds``. It raises nothing: ``result`` of a future does."""
    enough, limit = len(futures) if count is None else count, time.monotonic() + seconds
    while True:
        # all are looked at once: one that came between two looks would be counted by neither
        missing = _missing(futures)
        done = [future for future in futures if missing.isdisjoint(future.refs)]
        left = limit - time.monotonic()
        if len(done) >= min(enough, len(futures)) or left <= 0:
            return done, [future for future in futures if future not in done]
        futures[0].transport.ready(list(missing), left, first=True)


def _missing(futures: Sequence[Future[Any]]) -> set[Any]:
    """The answers that have not come yet."""
    refs = list(dict.fromkeys(itertools.chain.from_iterable(future.refs for future in futures)))
    return set(refs).difference(futures[0].transport.ready(refs, 0.0)) if refs else set()
