"""Calls from the driver to workers.

A call sends rows to ranks and runs an operation on them. The results stay on the ranks, and the driver gets
RemoteColumns that stand for them. This module also counts the bytes that processes send to each other, by
kind.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import Level
from rlflow.cluster.rpc.message import KEPT, NOTHING, Answer, Call, Inputs, ShardRows, Source, pickled
from rlflow.cluster.rpc.pool import Future, Pool
from rlflow.cluster.rpc.row_messages import inline, size_of
from rlflow.cluster.sharding.route import Routes, RowRequest, Transfer
from rlflow.cluster.sharding.shard_map import RemoteColumn, Shard, ShardMap, WorkerId, row_tokens
from rlflow.cluster.sharding.split import balanced, check_counts, units_of_rows
from rlflow.cluster.sharding.tp_groups import PLAIN, asked, used
from rlflow.cluster.worker import Worker
from rlflow.compiler.placement import Parallel
from rlflow.compiler.spans import RankSpan
from rlflow.execution.engine import CallOptions

KINDS = ("columns", "weights", "commits")


class Traffic:
    """Counts the bytes that processes send to each other. Safe to use from several threads.

    Data that the ranks of a pool exchange during a computation, such as gradients, isn't counted.
    """

    def __init__(self) -> None:
        self._bytes = dict.fromkeys(KINDS, 0)
        self._lock = threading.Lock()

    def add(self, kind: str, size: int) -> None:
        """Add ``size`` bytes to the count for ``kind``, which must be one of KINDS."""
        with self._lock:
            self._bytes[kind] += size

    def take(self) -> dict[str, int]:
        """Return the bytes counted since the last call, by kind, and reset the counters."""
        with self._lock:
            counted, self._bytes = self._bytes, dict.fromkeys(KINDS, 0)
        return counted


NO_ARGUMENTS = pickled({})
PUT_SECONDS = 300.0  # time limit for ranks to store rows that the driver sends
MAX_SPANS = 1 << 16  # maximum number of spans that are kept until they are collected


class ShardLedger:
    """State shared by all iterations of a run: shard keys, time spans of ranks, and byte counters.

    It also records which shards each worker may drop (``mark_unused`` and ``take_unused``).
    """

    def __init__(self, pools: Iterable[Pool[Worker]]) -> None:
        self._keys = itertools.count(1)
        self._gone: dict[WorkerId, deque[int]] = {
            pool.at(rank): deque() for pool in pools for rank in range(len(pool))
        }
        self._ran: deque[RankSpan] = deque(maxlen=MAX_SPANS)
        self.traffic = Traffic()
        self.ended = -1  # workers have dropped all shards of this iteration and earlier ones
        # called with lines that rewards on workers print
        self.on_output: Callable[[bytes], object] = lambda lines: None

    def key(self) -> int:
        """Return a shard key that is unique within the run."""
        return next(self._keys)

    def mark_unused(self, at: WorkerId, key: int) -> None:
        """Record that the worker ``at`` may drop its shard ``key``."""
        self._gone[at].append(key)

    def take_unused(self, at: WorkerId) -> list[int]:
        """Return the keys of shards that the worker ``at`` may now drop. Each key is returned only once."""
        waiting, keys = self._gone[at], list[int]()
        with contextlib.suppress(IndexError):  # several threads may take keys
            for _ in range(len(waiting)):
                keys.append(waiting.popleft())
        return keys

    def remember(self, spans: Iterable[RankSpan]) -> None:
        """Store the time spans during which ranks ran, until ``ran`` returns them."""
        self._ran.extend(spans)

    def ran(self) -> list[RankSpan]:
        """Return the time spans stored by ``remember`` since the last call."""
        return [self._ran.popleft() for _ in range(len(self._ran))]


@dataclass(frozen=True)
class Calls:
    """Calls to the ranks of a run's pools during one iteration.

    The ``call_options`` of each method give the call's deadline and its node.
    """

    pools: Mapping[str, Pool[Worker]]
    ledger: ShardLedger
    iteration: int
    lasts: bool = False  # whether ranks keep results after the iteration, as long as they are used

    # -- operations
    # --------------------------------------------------------------------------------------------------------

    def on_one(
        self,
        pool: Pool[Worker],
        rank: int,
        op: str,
        batch: Batch,
        rows: Tensor,
        arguments: Mapping[str, Any],
        call_options: CallOptions,
        group: str = "cpu",
    ) -> Answer:
        """Run the operation ``op`` on one rank, with the given rows of a batch, and return the rank's answer.

        ``rows``: row indices. ``group``: the worker's thread group that runs the operation.
        """
        return self._on(
            pool, op, {rank: Routes(batch).to(rows, pool.at(rank))}, arguments, call_options, group
        )[rank]

    def on_each(
        self,
        pool: Pool[Worker],
        op: str,
        batches: Mapping[int, Batch],
        arguments: Mapping[str, Any],
        call_options: CallOptions,
        group: str = "cpu",
    ) -> dict[int, Answer]:
        """Run the operation ``op`` on several ranks in parallel, and return their answers by rank.

        ``batches``: rank → its batch. ``group``: the workers' thread group that runs the operation.
        """
        requests = {
            rank: Routes(batch).to(torch.arange(len(batch)), pool.at(rank)) for rank, batch in batches.items()
        }
        return self._on(pool, op, requests, arguments, call_options, group)

    def run(
        self,
        pool: Pool[Worker],
        op: str,
        batch: Batch,
        split: Sequence[Tensor],
        arguments: Mapping[str, Any],
        call_options: CallOptions,
        group: str,
        parallel: Parallel = PLAIN,
    ) -> dict[int, Answer]:
        """Run the operation ``op`` on a batch split over a pool's ranks, and return their answers by rank.

        ``split``: the row indices of each rank. Ranks without rows also run the operation if the model's
        parallelism (``parallel``) requires it, but their answers are dropped. If no rank has rows, rank 0
        runs the operation. A rank keeps the rows that it gets from other ranks, for later calls in the same
        iteration.
        """
        routes, key = Routes(self.spread(batch, pool.name)), self.ledger.key
        requests = {
            rank: routes.to(rows, pool.at(rank), self.iteration, key)
            for rank, rows in asked(split, parallel).items()
        }
        return self.counted(pool, self._on(pool, op, requests, arguments, call_options, group), split)

    def counted(
        self, pool: Pool[Worker], answers: Mapping[int, Answer], split: Sequence[Tensor]
    ) -> dict[int, Answer]:
        """Return the answers of ranks that have rows in ``split``, and mark the other ranks' shards as
        unused.
        """
        ranks = used(split)
        for rank, answer in answers.items():
            if rank not in ranks:
                self.ledger.mark_unused(pool.at(rank), answer.key)
        return {rank: answers[rank] for rank in ranks}

    def _on(
        self,
        pool: Pool[Worker],
        op: str,
        requests: Mapping[int, RowRequest],
        arguments: Mapping[str, Any],
        call_options: CallOptions,
        group: str,
    ) -> dict[int, Answer]:
        """Run an operation on the ranks in ``requests``, and return their answers by rank.

        Operations that don't use a model go over a socket, as a short call, where possible.
        """
        raw_arguments, coming = pickled(arguments), self._coming(pool, requests, call_options.seconds)
        frames = {
            rank: self._frame(pool.at(rank), op, request.inputs, raw_arguments, coming[rank])
            for rank, request in requests.items()
        }
        answers = self._answers(
            pool,
            op,
            requests,
            self._send_frames(pool, op, frames, coming, call_options.seconds, group, group == "cpu"),
            call_options,
        )
        for rank, request in requests.items():
            request.note(pool.at(rank), self.iteration, self.ledger.mark_unused, self.ledger.ended)
        return answers

    def _send_frames(
        self,
        pool: Pool[Worker],
        op: str,
        frames: Mapping[int, bytes],
        coming: Mapping[int, Sequence[Any]],
        seconds: float,
        group: str,
        short: bool,
    ) -> Future[list[Any]]:
        """Send each rank its frame of a call, and return a future for the answers.

        ``coming``: rank → rows from other workers. Rows too large for a frame are sent separately, by Ray.
        ``short``: whether to try a short call over a socket first.
        """
        by_ray = {
            rank: [row_message for row_message in coming[rank] if inline(row_message) is None]
            for rank in frames
        }
        call = pool.short_call(op, frames, seconds) if short and frames and not any(by_ray.values()) else None
        if call is not None:
            return call
        refs = [(rank, pool.run(rank, frame, by_ray[rank], group)) for rank, frame in frames.items()]
        return pool.future(op, refs, seconds, list)

    # -- rows of other workers
    # ---------------------------------------------------------------------------------------------------

    def _coming(
        self, pool: Pool[Worker], requests: Mapping[int, RowRequest], seconds: float
    ) -> dict[int, list[Any]]:
        """For each rank, return the rows that it gets from other workers, in the order of its request.

        Rows from workers on this machine are messages. All others are Ray references, so that Ray moves the
        rows without the driver ever touching them.
        """
        wanted: dict[WorkerId, list[Transfer]] = {}
        for rank, request in requests.items():
            for part in request.transfers if request.transfers and pool.near(rank) else ():
                wanted.setdefault(part.at, []).append(part)
        here = {
            at: iter(row_messages)
            for name in {at.pool for at in wanted}
            for at, row_messages in self._sliced(name, wanted, seconds)
        }
        return {
            rank: [self._come(part, here, pool.near(rank)) for part in request.transfers]
            for rank, request in requests.items()
        }

    def _come(self, part: Transfer, here: Mapping[WorkerId, Iterator[Any]], near: bool) -> Any:
        row_message = next(here[part.at]) if near and part.at in here else None
        return self._slice(part, near) if row_message is None else row_message

    def _sliced(
        self, name: str, wanted: Mapping[WorkerId, Sequence[Transfer]], seconds: float
    ) -> Iterable[tuple[WorkerId, Sequence[Any]]]:
        """Get the ``wanted`` rows from the workers of pool ``name`` that share memory with this process.

        Returns one (worker, messages) pair per worker, or nothing if a short call isn't possible.
        """
        pool = self.pools[name]
        parts = {
            at: [(part.key, part.names, part.rows) for part in parts]
            for at, parts in wanted.items()
            if at.pool == name
        }
        frames = {
            at.rank: self._call("slices", pickled({"parts": parts[at]})) for at in parts if pool.near(at.rank)
        }
        call = pool.short_call("slices", frames, seconds) if frames else None
        answers = [Answer.unpacked(each) for each in call.result()] if call is not None else []
        self._hear(answers)
        return [(pool.at(rank), answer.value) for rank, answer in zip(frames, answers, strict=False)]

    def _call(self, op: str, arguments: bytes) -> bytes:
        """Return a packed call without rows.

        Unlike ``_frame``, this doesn't include the keys of shards to drop, because the call may never be
        sent.
        """
        return Call(op, self.ledger.key(), NOTHING, self.iteration).packed(arguments)

    def _slice(self, part: Transfer, near: bool) -> Any:
        """Ask a worker for the rows of ``part``, and return a Ray reference to them.

        ``near``: whether the receiver shares memory with this process.
        """
        pool, rank = self.pools[part.at.pool], part.at.rank
        return pool.send(
            rank,
            "slice",
            part.key,
            part.names,
            part.rows,
            near and pool.near(rank),
            self.iteration,
            group="io",
        )

    # -- one rank after another
    # --------------------------------------------------------------------------------------------------

    def ask(
        self,
        pool: Pool[Worker],
        rank: int,
        op: str,
        routes: Routes,
        rows: Tensor,
        arguments: bytes,
        group: str,
        chunks: bool = False,
    ) -> Any:
        """Start the operation ``op`` on one rank, and return a reference to its answer.

        ``routes`` describes the batch, and ``rows`` gives the indices of this rank's rows. With ``chunks``,
        the operation answers several times, and this returns an iterator over references.
        """
        request = routes.to(rows, pool.at(rank))
        by_ray = [self._slice(part, pool.near(rank)) for part in request.transfers]
        return (pool.run_chunks if chunks else pool.run)(
            rank, self._frame(pool.at(rank), op, request.inputs, arguments), by_ray, group
        )

    def answers(
        self, pool: Pool[Worker], op: str, refs: Mapping[int, Any], call_options: CallOptions
    ) -> dict[int, Answer]:
        """Wait for answers from several ranks, and return them by rank.

        ``refs``: rank → the reference returned by ``ask``.
        """
        return self._answers(
            pool, op, refs, pool.future(op, list(refs.items()), call_options.seconds, list), call_options
        )

    def _answers(
        self,
        pool: Pool[Worker],
        op: str,
        ranks: Iterable[int],
        future: Future[list[Any]],
        call_options: CallOptions,
    ) -> dict[int, Answer]:
        answers = dict(zip(ranks, map(Answer.unpacked, future.result()), strict=True))
        self.remember(pool, op, answers, call_options)
        return answers

    def remember(
        self, pool: Pool[Worker], op: str, answers: Mapping[int, Answer], call_options: CallOptions
    ) -> None:
        """Record when each rank ran and how many bytes it received, and pass on any output of its rewards.

        Times are converted to this process's clock.
        """
        self.ledger.traffic.add("columns", sum(answer.received for answer in answers.values()))
        self._hear(answers.values())
        shift = time.monotonic() - time.time()
        self.ledger.remember(
            RankSpan(
                call_options.node or op,
                pool.name,
                rank,
                answer.ran[0] + shift,
                answer.ran[1] + shift,
                self.iteration,
                op,
            )
            for rank, answer in answers.items()
        )

    def _hear(self, answers: Iterable[Answer]) -> None:
        """Pass on the output that rewards printed on the workers, which arrives with the answers."""
        for answer in answers:
            if answer.printed:
                self.ledger.on_output(answer.printed)

    def _frame(
        self,
        at: WorkerId,
        op: str,
        inputs: Inputs,
        arguments: bytes,
        coming: Sequence[Any] = (),
        key: int | None = None,
    ) -> bytes:
        """Pack a call to the worker ``at`` into bytes.

        ``key``: the key under which the worker stores the result. By default, a new key is made.
        """
        key, forget = self.ledger.key() if key is None else key, self.ledger.take_unused(at)
        until = KEPT if self.lasts else self.iteration
        return Call(
            op, key, inputs, until, {}, forget, [inline(row_message) for row_message in coming]
        ).packed(arguments)

    # -- columns on workers
    # ------------------------------------------------------------------------------------------------------

    def spread(self, batch: Batch, pool: str | None, split: Sequence[Tensor] | None = None) -> Batch:
        """Return the batch with all its columns except scalars on workers.

        Columns already on workers stay where they are. The driver's own columns are sent to the ranks of
        ``pool``. If ``pool`` is None, the batch is returned unchanged. ``split``: the row indices that each
        rank gets, by default balanced.
        """
        columns = {name: data for name, data in batch.data.items() if data.kind.level is not Level.SCALAR}
        here = {name: data for name, data in columns.items() if not isinstance(data, RemoteColumn)}
        if not here or pool is None:
            return batch
        driver_batch, target = Batch(batch.axis, here), self.pools[pool]
        if split is None:
            units = units_of_rows(batch.axis.slots if batch.axis.grouped else None, len(batch))
            split = balanced(units, row_tokens(here, len(batch)), len(target))
        return Batch(batch.axis, batch.data | self._put(target, driver_batch, split).data)

    def _put(self, pool: Pool[Worker], batch: Batch, split: Sequence[Tensor]) -> Batch:
        """Send one of the driver's batches to the ranks of a pool, and return it with RemoteColumns.

        ``split``: the row indices of each rank.
        """
        used = {rank: rows for rank, rows in enumerate(split) if len(rows)}
        shards = {
            rank: self._shard(pool.at(rank), self.ledger.key(), len(rows)) for rank, rows in used.items()
        }
        source = [Source([(name, name) for name in batch.data], [ShardRows(None)])]
        coming = {
            rank: [pool.mailbox.message(batch, rows, shared=pool.near(rank), iteration=self.iteration)]
            for rank, rows in used.items()
        }
        self.ledger.traffic.add("columns", sum(size_of(row_message) for [row_message] in coming.values()))
        inputs = {
            rank: Inputs(batch.axis.keys[rows].numpy(), batch.axis.grouped, source)
            for rank, rows in used.items()
        }
        frames = {
            rank: self._frame(pool.at(rank), "hold", inputs[rank], NO_ARGUMENTS, coming[rank], shard.key)
            for rank, shard in shards.items()
        }
        self._send_frames(pool, "hold", frames, coming, PUT_SECONDS, "io", True).result()
        rows_at = ShardMap.of(list(shards.values()), list(used.values()), len(batch), batch.axis)
        columns = {
            name: RemoteColumn(data.kind, rows_at, data.lengths, name, data.nbytes)
            for name, data in batch.data.items()
        }
        return Batch(batch.axis, columns)

    def _shard(self, at: WorkerId, key: int, rows: int) -> Shard:
        return Shard(at, key, rows, self.ledger.mark_unused)

    def kept(
        self, pool: Pool[Worker], answers: Mapping[int, Answer], split: Sequence[Tensor], axis: Axis
    ) -> Batch:
        """Return the results that ranks stored for a call, as one batch of RemoteColumns over ``axis``.

        ``split``: the indices in ``axis`` of each rank's rows. Raises ValueError if a rank stored a different
        number of rows.
        """
        ranks = sorted(answers)
        check_counts(
            [split[rank] if rank < len(split) else split[0] for rank in ranks],
            [answers[rank].rows for rank in ranks],
        )
        shards = [self._shard(pool.at(rank), answers[rank].key, answers[rank].rows) for rank in ranks]
        first = answers[ranks[0]]
        columns: dict[str, Data] = dict(first.scalars)
        if len(split) >= len(ranks):
            layout = ShardMap.of(shards, [split[rank] for rank in ranks], len(axis), axis)
            by_level = {
                level: [(split[rank], answers[rank].lengths[level]) for rank in ranks]
                for level in first.lengths
            }
            lengths = {level: _lengths(parts, len(axis)) for level, parts in by_level.items()}
            for name, (kind, _) in first.columns.items():
                size = sum(answers[rank].columns[name][1] for rank in ranks)
                columns[name] = RemoteColumn(kind, layout, lengths.get(kind.level.value), name, size)
        return Batch(axis, columns)


def _lengths(parts: Sequence[tuple[Tensor, Any]], rows: int) -> Tensor:
    lengths = np.zeros(rows, np.int64)
    for rows_of_part, values in parts:
        lengths[rows_of_part.numpy()] = values
    return torch.from_numpy(lengths)
