"""Calls that workers answer several times while they run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlflow.author import methods
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.cluster.calls import Calls
from rlflow.cluster.rpc.message import Answer
from rlflow.cluster.rpc.pool import Future, Pool
from rlflow.execution.engine import Chunks, whole
from rlflow.processes.deadline import LOOK


class Streams(Future[list[Any]]):
    """The answers of several ranks to one call that each of them answers several times.

    ``streams``: rank → the iterator that ``Pool.run_chunks`` returned. ``seconds``: the deadline of the whole
    call. ``note``: a function that is called with each set of answers, by rank.
    """

    def __init__(
        self,
        pool: Pool[Any],
        what: str,
        streams: Mapping[int, Any],
        seconds: float,
        note: Callable[[Mapping[int, Any]], None],
    ) -> None:
        super().__init__(
            pool.transport,
            what,
            [pool.at(rank) for rank in streams],
            list(streams.values()),
            seconds,
            list,
            pool.watcher,
        )
        self.pool, self._ranks, self._note = pool, tuple(streams), note

    def next(self) -> dict[int, Any]:
        """Wait for the next answer of each rank, and return the answers by rank.

        Raises the same errors as ``Future.result``.
        """
        refs = list(zip(self._ranks, self._answers(), strict=True))
        answers = self.pool.future(self.what, refs, max(self._limit.left(), LOOK), list).result()
        by_rank = dict(zip(self._ranks, map(Answer.unpacked, answers), strict=True))
        self._note(by_rank)
        return by_rank

    def _look(self, seconds: float) -> list[Any] | None:
        """Return references to the next answers once they have all arrived, or None after ``seconds``."""
        answered = len(self.transport.ready(self.refs, seconds)) == len(self.refs)
        return [next(stream) for stream in self.refs] if answered else None


def chunks_of(
    calls: Calls, answers: Streams, into: Chunks, rows: Sequence[Tensor], axis: Axis
) -> Iterator[Batch]:
    """Yield the chunks of rows that a pool samples, and finally a batch with all rows.

    ``rows``: the indices in ``axis`` of each rank's rows. Each chunk has the rows of one answer from every
    rank. The last batch has all rows, in the same order as without chunks.
    """
    for _ in range(into.count):
        yield _chunk(calls, answers, rows, axis)
    everything = calls.counted(answers.pool, answers.next(), rows)
    yield whole(
        calls.kept(answers.pool, everything, rows, axis), len(axis), (*methods.GENERATE_GIVES, "group")
    )


def _chunk(calls: Calls, answers: Streams, rows: Sequence[Tensor], axis: Axis) -> Batch:
    """Return the next chunk as a batch: the rows of rank 0, then those of rank 1, and so on."""
    by_rank = calls.counted(answers.pool, answers.next(), rows)
    none = torch.zeros(0, dtype=torch.int64)
    chunk_rows = [
        rank_rows[torch.tensor(by_rank[rank].value)] if rank in by_rank else none
        for rank, rank_rows in enumerate(rows)
    ]
    places = list(torch.split(torch.arange(sum(map(len, chunk_rows))), [len(part) for part in chunk_rows]))
    return calls.kept(answers.pool, by_rank, places, axis.take(torch.cat(chunk_rows)))
