"""Calls of workers: an operation goes to ranks with the rows that it needs, and what they keep comes back as columns that lie there."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.axis import Axis
from rlflow.batch import Batch, Data
from rlflow.cluster.rpc.actor import Payload, packed
from rlflow.cluster.rpc.message import Answer, Call, pickled
from rlflow.cluster.rpc.pool import Future, Pool
from rlflow.cluster.sharding.route import Request, Routes
from rlflow.cluster.sharding.shard_map import RemoteColumn, Shard, ShardMap, WorkerId, row_tokens
from rlflow.cluster.sharding.split import balanced, check_counts, units_of_rows
from rlflow.cluster.sharding.tp_groups import PLAIN, asked, used
from rlflow.cluster.worker import Worker
from rlflow.columns import Level
from rlflow.execution.engine import CallOptions
from rlflow.placement import Parallel
from rlflow.spans import RankSpan

REMEMBERED = 1 << 16  # calls of ranks that nobody has asked for yet


class Ledger:
    """What calls of all iterations share: keys, those that nobody needs any more, and when ranks ran."""

    def __init__(self, pools: Iterable[Pool[Worker]]) -> None:
        self._keys = itertools.count(1)
        self._gone: dict[WorkerId, deque[int]] = {pool.at(rank): deque() for pool in pools for rank in range(len(pool))}
        self._ran: deque[RankSpan] = deque(maxlen=REMEMBERED)

    def key(self) -> int:
        return next(self._keys)

    def gone(self, at: WorkerId, key: int) -> None:
        """Nobody knows of a key any more."""
        self._gone[at].append(key)

    def forgotten(self, at: WorkerId) -> list[int]:
        """Keys that this worker is to forget, told once."""
        held, gone = self._gone[at], list[int]()
        with contextlib.suppress(IndexError):  # several threads ask
            for _ in range(len(held)):
                gone.append(held.popleft())
        return gone

    def forget_none(self) -> None:
        """The workers forget everything by themselves."""
        for gone in self._gone.values():
            gone.clear()

    def remember(self, spans: Iterable[RankSpan]) -> None:
        self._ran.extend(spans)

    def ran(self) -> list[RankSpan]:
        """What ran since this was asked last."""
        return [self._ran.popleft() for _ in range(len(self._ran))]


@dataclass(frozen=True)
class Calls:
    """Those of one iteration."""

    pools: Mapping[str, Pool[Worker]]
    ledger: Ledger
    iteration: int

    # -- operations --------------------------------------------------------------------------------------------------------------

    def on_one(
        self, pool: Pool[Worker], rank: int, op: str, batch: Batch, rows: Tensor, arguments: Mapping[str, Any], terms: CallOptions,
        group: str = "cpu",
    ) -> Answer:
        """An operation on one rank."""
        return self._on(pool, op, {rank: Routes(batch).to(rows, pool.at(rank))}, arguments, terms, group)[rank]

    def on_each(
        self, pool: Pool[Worker], op: str, batches: Mapping[int, Batch], arguments: Mapping[str, Any], terms: CallOptions,
        group: str = "cpu",
    ) -> dict[int, Answer]:
        """An operation on several ranks side by side, each with a batch of its own."""
        requests = {rank: Routes(batch).to(torch.arange(len(batch)), pool.at(rank)) for rank, batch in batches.items()}
        return self._on(pool, op, requests, arguments, terms, group)

    def run(
        self, pool: Pool[Worker], op: str, batch: Batch, split: Sequence[Tensor], arguments: Mapping[str, Any], terms: CallOptions,
        group: str, lies: Parallel = PLAIN,
    ) -> dict[int, Answer]:
        """The operation on each rank that has rows (on rank 0 where there are none at all) and on those that compute with it; the answers
        of the former by rank."""
        routes = Routes(self.spread(batch, pool.name))
        requests = {rank: routes.to(rows, pool.at(rank)) for rank, rows in asked(split, lies).items()}
        return self.counted(pool, self._on(pool, op, requests, arguments, terms, group), split)

    def counted(self, pool: Pool[Worker], answers: Mapping[int, Answer], split: Sequence[Tensor]) -> dict[int, Answer]:
        """The answers of ranks that have rows; what others keep, who computed with them, is forgotten."""
        kept = used(split)
        for rank, answer in answers.items():
            if rank not in kept:
                self.ledger.gone(pool.at(rank), answer.key)
        return {rank: answers[rank] for rank in kept}

    def _on(
        self, pool: Pool[Worker], op: str, requests: Mapping[int, Request], arguments: Mapping[str, Any], terms: CallOptions, group: str
    ) -> dict[int, Answer]:
        """The operation on some ranks. What needs no model, and whose columns are there already, is a short call."""
        told = pickled(arguments)
        frames = {rank: self._frame(pool.at(rank), op, request, told) for rank, request in requests.items()}
        coming = any(request.transfers for request in requests.values())
        spoken = pool.talk(op, frames, terms.seconds) if group == "cpu" and not coming else None
        if spoken is not None:
            return self._answers(pool, op, requests, spoken, terms)
        refs = {rank: pool.run(rank, frame, self._sent(requests[rank]), group) for rank, frame in frames.items()}
        return self.answers(pool, op, refs, terms)

    # -- one rank after another --------------------------------------------------------------------------------------------------

    def ask(
        self, pool: Pool[Worker], rank: int, op: str, routes: Routes, rows: Tensor, arguments: bytes, group: str, chunks: bool = False
    ) -> Any:
        """Start an operation on one rank; the reference of its answer, or of several those of all."""
        request = routes.to(rows, pool.at(rank))
        frame = self._frame(pool.at(rank), op, request, arguments)
        return (pool.run_chunks if chunks else pool.run)(rank, frame, self._sent(request), group)

    def answers(self, pool: Pool[Worker], op: str, refs: Mapping[int, Any], terms: CallOptions) -> dict[int, Answer]:
        """What the ranks answer to what they were asked."""
        return self._answers(pool, op, refs, pool.future(op, list(refs.items()), terms.seconds, list), terms)

    def _answers(
        self, pool: Pool[Worker], op: str, ranks: Iterable[int], future: Future[list[Any]], terms: CallOptions
    ) -> dict[int, Answer]:
        answers = dict(zip(ranks, map(Answer.unpacked, future.result()), strict=True))
        self.remember(pool, op, answers, terms)
        return answers

    def remember(self, pool: Pool[Worker], op: str, answers: Mapping[int, Answer], terms: CallOptions) -> None:
        """When each rank ran, by this process's own clock."""
        shift = time.monotonic() - time.time()
        self.ledger.remember(RankSpan(terms.node or op, pool.name, rank, answer.ran[0] + shift, answer.ran[1] + shift, self.iteration, op)
                             for rank, answer in answers.items())  # fmt: skip

    def _frame(self, at: WorkerId, op: str, request: Request, arguments: bytes) -> bytes:
        return Call(op, self.ledger.key(), request.inputs, self.iteration, {}, self.ledger.forgotten(at)).packed(arguments)

    def _sent(self, request: Request) -> list[Any]:
        """References of what lies on other workers: it comes from there, not through the driver."""
        return [self.pools[part.at.pool].send(part.at.rank, "slice", part.key, part.names, part.rows, group="io")
                for part in request.transfers]  # fmt: skip

    # -- columns on workers ------------------------------------------------------------------------------------------------------

    def spread(self, batch: Batch, pool: str | None) -> Batch:
        """The driver's columns on a pool; those that are there already, and scalars, as they are."""
        columns = {name: data for name, data in batch.data.items() if data.kind.level is not Level.SCALAR}
        here = {name: data for name, data in columns.items() if not isinstance(data, RemoteColumn)}
        if not here or pool is None:
            return batch
        own, chosen = Batch(batch.axis, here), self.pools[pool]
        units = units_of_rows(batch.axis.slots if batch.axis.grouped else None, len(batch))
        split = balanced(units, row_tokens(here, len(batch)), len(chosen))
        return Batch(batch.axis, batch.data | self._put(chosen, own, split).data)

    def _put(self, pool: Pool[Worker], batch: Batch, split: Sequence[Tensor]) -> Batch:
        """The driver's rows onto a pool."""
        shards, refs, used = [], [], []
        for rank, rows in enumerate(split):
            if len(rows):
                key = self.ledger.key()
                payload: Payload = packed(batch.rows(rows))
                refs.append((rank, pool.send(rank, "put", key, payload, self.iteration, group="io")))
                shards.append(self._shard(pool.at(rank), key, len(rows)))
                used.append(rows)
        pool.future("put", refs, 300.0, list).result()
        rows_at = ShardMap.of(shards, used, len(batch), batch.axis)
        columns = {name: RemoteColumn(data.kind, rows_at, data.lengths, name, data.nbytes) for name, data in batch.data.items()}
        return Batch(batch.axis, columns)

    def _shard(self, at: WorkerId, key: int, rows: int) -> Shard:
        return Shard(at, key, rows, self.ledger.gone)

    def kept(self, pool: Pool[Worker], answers: Mapping[int, Answer], split: Sequence[Tensor], axis: Axis) -> Batch:
        """What the ranks keep, as columns over ``axis``, whose rows ``split`` they were given, by the same keys."""
        ranks = sorted(answers)
        check_counts([split[rank] if rank < len(split) else split[0] for rank in ranks], [answers[rank].rows for rank in ranks])
        shards = [self._shard(pool.at(rank), answers[rank].key, answers[rank].rows) for rank in ranks]
        first = answers[ranks[0]]
        columns: dict[str, Data] = dict(first.scalars)
        if len(split) >= len(ranks):
            layout = ShardMap.of(shards, [split[rank] for rank in ranks], len(axis), axis)
            held = {level: [(split[rank], answers[rank].lengths[level]) for rank in ranks] for level in first.lengths}
            lengths = {level: _lengths(parts, len(axis)) for level, parts in held.items()}
            for name, (kind, _) in first.columns.items():
                size = sum(answers[rank].columns[name][1] for rank in ranks)
                columns[name] = RemoteColumn(kind, layout, lengths.get(kind.level.value), name, size)
        return Batch(axis, columns)


def _lengths(parts: Sequence[tuple[Tensor, Any]], rows: int) -> Tensor:
    lengths = np.zeros(rows, np.int64)
    for held, values in parts:
        lengths[held.numpy()] = values
    return torch.from_numpy(lengths)
