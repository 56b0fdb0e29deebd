"""Answers that several workers give one after another while a call of theirs goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch
from torch import Tensor

from rlflow.author import verbs
from rlflow.axis import Axis
from rlflow.batch import Batch
from rlflow.cluster.calls import Calls
from rlflow.cluster.rpc.message import Answer
from rlflow.cluster.rpc.pool import Future, Pool
from rlflow.deadline import LOOK
from rlflow.execution.engine import Chunks, whole


class Streams(Future[list[Any]]):
    """``streams``: those of ``Pool.run_chunks`` by rank. The deadline is that of the whole call. ``note`` is told all answers."""

    def __init__(
        self, pool: Pool[Any], what: str, streams: Mapping[int, Any], seconds: float, note: Callable[[Mapping[int, Any]], None]
    ) -> None:
        super().__init__(what, [pool.at(rank) for rank in streams], list(streams.values()), seconds, list, pool.watcher)
        self.pool, self._ranks, self._note = pool, tuple(streams), note

    def next(self) -> dict[int, Any]:
        """The next answer of each rank, when all are there. Raises as ``Future.result`` does."""
        refs = list(zip(self._ranks, self._answers(), strict=True))
        answers = self.pool.future(self.what, refs, max(self._limit.left(), LOOK), list).result()
        found = dict(zip(self._ranks, map(Answer.unpacked, answers), strict=True))
        self._note(found)
        return found

    def _look(self, seconds: float) -> list[Any] | None:
        """The reference of the next answer of each."""
        _, waiting = ray.wait(list(self.refs), num_returns=len(self.refs), timeout=seconds)
        return None if waiting else [next(stream) for stream in self.refs]


def chunks_of(calls: Calls, answers: Streams, into: Chunks, rows: Sequence[Tensor], axis: Axis) -> Iterator[Batch]:
    """What a pool samples, of which each rank has ``rows``: a chunk is what the ranks give as their chunk of this number, when all have; at
    last all rows, which lie as if there had been no chunks."""
    for _ in range(into.count):
        yield _chunk(calls, answers, rows, axis)
    everything = calls.counted(answers.pool, answers.next(), rows)
    yield whole(calls.kept(answers.pool, everything, rows, axis), len(axis), (*verbs.GENERATE_GIVES, "group"))


def _chunk(calls: Calls, answers: Streams, rows: Sequence[Tensor], axis: Axis) -> Batch:
    """The ranks' rows, those of one rank after those of another."""
    there = calls.counted(answers.pool, answers.next(), rows)
    none = torch.zeros(0, dtype=torch.int64)
    taken = [mine[torch.tensor(there[rank].value)] if rank in there else none for rank, mine in enumerate(rows)]
    places = list(torch.split(torch.arange(sum(map(len, taken))), [len(part) for part in taken]))
    return calls.kept(answers.pool, there, places, axis.take(torch.cat(taken)))
