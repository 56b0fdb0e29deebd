"""The engine of a run on pools: the same methods as in one process, but columns stay on the workers."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, ramp
from rlflow.author.columns import SOURCE, Kind, Level
from rlflow.author.dispatch import ALL, DP_COMPUTE, RANK0
from rlflow.author.joint import JointLoss
from rlflow.author.loss import Loss
from rlflow.author.node_options import ConcatOptions, UpdateOptions, Value
from rlflow.author.stage import Stage
from rlflow.cluster.calls import Calls, ShardLedger
from rlflow.cluster.rpc.message import pickled
from rlflow.cluster.rpc.pool import Pool
from rlflow.cluster.rpc.streams import Streams, chunks_of
from rlflow.cluster.sharding.custom_dispatch import by_own_mode
from rlflow.cluster.sharding.route import Routes
from rlflow.cluster.sharding.shard_map import RemoteColumn, joined, row_tokens
from rlflow.cluster.sharding.split import SLACK, balanced, keep_or_balance, off_balance, units_of_rows
from rlflow.cluster.sharding.steps import numbered, rank_steps
from rlflow.cluster.sharding.tp_groups import PLAIN, asked, first_ranks, teams
from rlflow.cluster.weights.sharded_models import RemoteModel
from rlflow.cluster.worker import Worker
from rlflow.compiler.placement import Parallel, Placement
from rlflow.compiler.spans import RankSpan
from rlflow.errors import RemoteError
from rlflow.execution.engine import HERE, CallOptions, Chunks, Engine, whole
from rlflow.execution.lineage import (
    UNFILLED,
    JoinedAxis,
    filling,
    joined_names,
    lacking,
    only_part,
    per_row,
    with_rows,
)
from rlflow.execution.row_figures import NO_REWARDS, ScoredRecords
from rlflow.execution.row_ledger import UpdateRows
from rlflow.execution.summary import IterationSummary
from rlflow.execution.tally import PartialMetrics, known, merged
from rlflow.execution.wire.row_bytes import Payload, RowRanks, opened
from rlflow.processes.deadline import Deadline
from rlflow.training.learning import together
from rlflow.training.loss_rows import WITH_GROUP, with_groups
from rlflow.training.protocols import Sampling

# time limit for workers to forget an iteration; a worker that is late forgets it together with the next
# iteration
CLEARED_SECONDS = 5.0
FETCHED = 64 << 10  # maximum size of a column that the driver fetches, in bytes


@dataclass
class ClusterEngine(Engine):
    """Runs the operations of one iteration on pools of workers, each of which has its own ``LocalEngine``."""

    models: Mapping[str, RemoteModel]  # by role
    pools: Mapping[str, Pool[Worker]] = field(default_factory=dict)
    placement: Placement = field(default_factory=lambda: Placement({}))
    # stage or loss → its name on the workers
    names: Mapping[Hashable, str] = field(default_factory=dict)
    # reward role → pools that can compute it
    judging: Mapping[str, Collection[str]] = field(default_factory=dict)
    limited: Collection[str] = ()  # pools that offload parts of models because their memory is limited
    lasts: bool = False  # whether columns are kept after the iteration, see ``lasting``

    def __post_init__(self) -> None:
        self._ledger = ShardLedger(self.pools.values())
        self._sampling = threading.Lock()

    @property
    def calls(self) -> Calls:
        """The calls of this engine's iteration. All iterations share one ledger."""
        return Calls(self.pools, self._ledger, self.iteration, self.lasts)

    # -- calls of the contract
    # ---------------------------------------------------------------------------------------------------

    def sample(
        self, role: str, prompts: Batch, sampling: Sampling, seed: int, call_options: CallOptions = HERE
    ) -> Batch:
        """Sample ``sampling.samples`` rows per prompt with the role's generator, and return the new columns.

        The columns stay on the ranks of the generator's pool. A generator has only one set of weights, so
        concurrent calls take turns.
        """
        with self._sampling:
            return self._sample(role, prompts, sampling, seed, call_options)

    def _sample(
        self, role: str, prompts: Batch, sampling: Sampling, seed: int, call_options: CallOptions
    ) -> Batch:
        pool, prompts = self._ready(role, prompts, call_options)
        axis = prompts.axis.repeat(sampling.samples)
        arguments = {"role": role, "sampling": sampling, "seed": seed}
        parallel = self.placement.parallelism(role, "generator")
        split = self._split(prompts, pool, parallel=parallel)
        answers = self.calls.run(pool, "generate", prompts, split, arguments, call_options, "model", parallel)
        return whole(
            self.calls.kept(pool, answers, _repeated(split, sampling.samples), axis),
            len(axis),
            self.sampled_columns(role),
        )

    def _ready(self, role: str, prompts: Batch, call_options: CallOptions) -> tuple[Pool[Worker], Batch]:
        """Give the generator the weights to sample with. Return its pool, with the prompt columns on it."""
        model, pool = self.models[role], self.pools[self.placement.generators[role]]
        if (frozen := self.weights.get(role)) is not None:
            model.use(frozen, call_options.seconds)
        else:
            model.synchronise(call_options.seconds)
        return pool, self.spread(self.to_sample(role, prompts), pool.name)

    def sample_chunks(
        self,
        role: str,
        prompts: Batch,
        sampling: Sampling,
        seed: int,
        into: Chunks,
        call_options: CallOptions = HERE,
    ) -> Iterator[Batch]:
        """Like ``sample``, but yield the rows in chunks.

        A chunk is yielded once every rank has sampled its part of it. The last batch yielded contains all
        rows and equals what ``sample`` would return.
        """
        with self._sampling:
            pool, prompts = self._ready(role, prompts, call_options)
            axis, parallel = (
                prompts.axis.repeat(sampling.samples),
                self.placement.parallelism(role, "generator"),
            )
            split = self._split(prompts, pool, parallel=parallel)
            routes, common, streams = (
                Routes(prompts),
                {"role": role, "sampling": sampling, "seed": seed, "into": into},
                {},
            )
            for rank, rows in asked(split, parallel).items():
                arguments = pickled({**common, "keys": [self._ledger.key() for _ in range(into.count)]})
                streams[rank] = self.calls.ask(
                    pool, rank, "generate", routes, rows, arguments, "model", chunks=True
                )
            answers = Streams(
                pool,
                "generate",
                streams,
                call_options.seconds,
                lambda there: self.calls.remember(pool, "generate", there, call_options),
            )
            yield from chunks_of(self.calls, answers, into, _repeated(split, sampling.samples), axis)

    def forward(
        self, role: str, want: tuple[str, ...], batch: Batch, call_options: CallOptions = HERE
    ) -> Batch:
        """Run the forward pass of a role's trainer, and return the columns named in ``want``."""
        pool, parallel = (
            self.pools[self.placement.trainers[role]],
            self.placement.parallelism(role, "trainer"),
        )
        split = self._split(batch, pool, parallel=parallel)
        # if the pool has several ranks, a rank updates on different rows than it scores here
        ahead = call_options.ahead and len(pool) == 1
        answers = self.calls.run(
            pool,
            "forward",
            batch,
            split,
            {"role": role, "want": want, "ahead": ahead},
            call_options,
            "model",
            parallel,
        )
        return whole(self.calls.kept(pool, answers, split, batch.axis), len(batch), want)

    def score(self, role: str, batch: Batch, call_options: CallOptions = HERE) -> Batch:
        """Return the log-probs of the given rows under the role's generator. The weight check uses this."""
        self.models[role].synchronise(call_options.seconds)
        pool, parallel = (
            self.pools[self.placement.generators[role]],
            self.placement.parallelism(role, "generator"),
        )
        split = self._split(batch, pool, parallel=parallel)
        answers = self.calls.run(pool, "score", batch, split, {"role": role}, call_options, "model", parallel)
        return whole(self.calls.kept(pool, answers, split, batch.axis), len(batch), ("logprobs",))

    def reward(
        self, role: str, batch: Batch, call_options: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """Score rows with a role's rewards, and return the scores and metrics.

        A reward model runs on its own pool. A reward function runs on the pool that has most of the batch.
        """
        name = self.placement.trainers.get(role)
        pool = self.pools[name] if name else self._nearest(batch, call_options, self.judging.get(role))
        parallel = self.placement.parallelism(role, "trainer")
        split = self._split(batch, pool, parallel=parallel)
        answers = self.calls.run(
            pool, "reward", batch, split, {"role": role}, call_options, "model" if name else "io", parallel
        )
        tallies = merged([answer.tallies for answer in answers.values()])
        return self.calls.kept(pool, answers, split, batch.axis), tallies

    def stage(
        self,
        stage: Stage,
        batch: Batch,
        settings: Mapping[str, Any],
        call: int,
        call_options: CallOptions = HERE,
    ) -> tuple[Batch, PartialMetrics]:
        """Run a stage, and return its columns and metrics.

        A stage with a role runs on the pool of that role's trainer, and any other stage on the pool that has
        most of the batch. The stage's dispatch mode decides which rows each rank gets.
        """
        self.may_change(stage)
        pool = (
            self.pools[self.placement.trainers[stage.on]] if stage.on else self._nearest(batch, call_options)
        )
        arguments = {
            "function": self.names[id(stage)],
            "settings": dict(settings),
            "seed": self.seed_of(call),
        }
        if stage.dispatch.split is not None:
            return by_own_mode(self.calls, pool, stage, batch, arguments, call_options)
        group = "model" if stage.on else "cpu"
        parallel = (
            self.placement.parallelism(stage.on, "trainer")
            if stage.on and stage.dispatch == DP_COMPUTE
            else PLAIN
        )
        split = self._dispatched(stage, batch, pool, parallel)
        answers = self.calls.run(pool, "stage", batch, split, arguments, call_options, group, parallel)
        result_split = split if stage.dispatch != ALL else split[:1]
        result = self.calls.kept(pool, answers, result_split, batch.axis)
        if stage.dispatch == ALL:
            every = {
                name: tuple(value for answer in answers.values() for value in answer.scalars[name].value)
                for name in result.data
            }
            result = Batch(
                batch.axis, {name: Data(result.data[name].kind, values) for name, values in every.items()}
            )
        return result, merged([answer.tallies for answer in answers.values()])

    def update(
        self,
        role: str,
        batch: Batch,
        loss: Loss,
        options: UpdateOptions,
        settings: Mapping[str, Any],
        call: int,
        call_options: CallOptions = HERE,
        fresh: bool = False,
    ) -> tuple[PartialMetrics, UpdateRows]:
        """Train a role on the ranks of its pool. Return the metrics, and which rows the update used.

        ``fresh``: whether to reset the optimizer first.
        """
        names = loss.signature.column_names
        pool = self.pools[self.placement.trainers[role]]
        function: dict[str, Any] = {"function": self.names[loss.key], "role": role}
        batch = self.spread(batch, pool.name)
        home = self._home(batch, pool) or balanced(
            units_of_rows(None, len(batch)), row_tokens(batch.data, len(batch)), len(pool)
        )
        batch, facts = self._facts(pool, batch, loss, home, function, call_options)
        width = self.placement.parallelism(role, "trainer").tensor
        plan = rank_steps(
            facts,
            loss.rows == "group",
            len(pool) // width,
            seed=self.seed_of(call),
            epochs=options.epochs,
            minibatch=options.minibatch,
            mean=options.mean,
        )
        function |= {"mean": options.mean, "settings": settings, "fresh": fresh}
        routes, refs = Routes(batch), {}
        for rank in range(len(pool)):
            arguments = pickled({**function, "steps": plan.steps[rank // width]})
            refs[rank] = self.calls.ask(
                pool, rank, "update", routes, plan.rows[rank // width], arguments, "model"
            )
        learned = [
            answer.value
            for rank, answer in self.calls.answers(pool, "update", refs, call_options).items()
            if rank % width == 0
        ]
        self.models[role].version += 1
        broken = (
            with_groups(facts[:, 0], numbered(facts[:, 3]), WITH_GROUP)
            if loss.rows == "group"
            else facts[:, 0]
        )
        metrics = together(learned, plan.left_out)
        return known(metrics), UpdateRows(broken, names, stepped=metrics["steps"] > 0, tokens=facts[:, 1])

    def move(self, role: str, other: str, mix: float, call_options: CallOptions = HERE) -> None:
        """Move the weights of a role's trainer towards those of another role's trainer.

        On the same pool, each rank moves its own part. Otherwise, the other's weights are transferred.
        """
        pool, seconds = self.placement.trainers[role], call_options.seconds
        if pool == self.placement.trainers[other]:
            self.pools[pool].call(Worker.follow, role, other, mix, seconds=seconds, group="model").result()
        else:
            self.models[role].follow(self.models[other], mix, seconds)

    def _facts(
        self,
        pool: Pool[Worker],
        batch: Batch,
        loss: Loss,
        home: Sequence[Tensor],
        function: Mapping[str, Any],
        call_options: CallOptions,
    ) -> tuple[Batch, Tensor]:
        """Return the rows of an update as the ranks store them, and facts about each row.

        The facts are int64 [rows, 4], or [rows, 4 + losses] if there are several losses. ``home``: the row
        indices of each rank.
        """
        losses = len(loss.losses) if isinstance(loss, JointLoss) else 0
        facts = torch.zeros(len(batch), 4 + losses, dtype=torch.int64)
        answers = self.calls.run(pool, "facts", batch, home, function, call_options, "cpu")
        for rank, answer in answers.items():
            facts[home[rank]] = torch.tensor(answer.value)
        # rows from another pool are transferred only once
        return self.calls.kept(pool, answers, home, batch.axis), facts

    def encoded(self, batch: Batch, roles: tuple[str, ...], call_options: CallOptions = HERE) -> Batch:
        """Encode follow-up prompts for ``roles``, on the pool that has most of the prompts."""
        pool = self._nearest(batch, call_options)
        split = self._split(batch, pool)
        answers = self.calls.run(pool, "encode", batch, split, {"roles": roles}, call_options, "cpu")
        return self.calls.kept(pool, answers, split, batch.axis)

    def responses(self, batch: Batch, roles: tuple[str, ...], call_options: CallOptions = HERE) -> Batch:
        """Encode responses for ``roles``, on the pool that has most of the rows."""
        pool = self._nearest(batch, call_options)
        split = self._split(batch, pool)
        answers = self.calls.run(pool, "responses", batch, split, {"roles": roles}, call_options, "cpu")
        return self.calls.kept(pool, answers, split, batch.axis)

    def cut(self, batch: Batch, call_options: CallOptions = HERE) -> tuple[Batch, Tensor]:
        """Return the beginnings of responses from which new responses continue, and their lengths in tokens.

        Both are computed on the ranks that store the rows.
        """
        pool = self._nearest(batch, call_options)
        split = self._split(batch, pool)
        answers = self.calls.run(pool, "cut", batch, split, {}, call_options, "cpu")
        counts = torch.zeros(len(batch), dtype=torch.int64)
        for rank, answer in answers.items():
            counts[split[rank]] = torch.tensor(answer.value[0])
        starts, place = counts.cumsum(0) - counts, torch.zeros(int(counts.sum()), dtype=torch.int64)
        begun = [starts[rows].repeat_interleave(counts[rows]) + ramp(counts[rows]) for rows in split]
        for rank, answer in answers.items():
            place[begun[rank]] = torch.tensor(answer.value[1])
        axis = batch.axis.take(torch.arange(len(batch)).repeat_interleave(counts))
        return self.calls.kept(pool, answers, begun, axis), place

    def concat(
        self, parts: Sequence[Batch], options: ConcatOptions = UNFILLED, call_options: CallOptions = HERE
    ) -> Batch:
        """Join the rows of all ``parts`` into one batch, with the columns that all have or ``options`` fill.

        A column that has the same stored name in every part stays on its workers. All others are copied to
        one rank.
        """
        parts = [self._with_filled(part, lacking(part, parts, options), call_options) for part in parts]
        if (only := only_part(parts, options)) is not None:
            return only
        rows, kept = JoinedAxis.of([part.axis for part in parts], options), joined_names(parts)
        parts = with_rows(parts)
        pool = self._nearest(parts[0], call_options).name
        parts = [self.spread(self.per_row(part), pool) for part in parts]
        names = {
            name: {data.name for part in parts if isinstance(data := part.data[name], RemoteColumn)}
            for name in kept
        }
        alike = [name for name, known in names.items() if len(known) < 2]
        others = [name for name in names if name not in alike]
        whole = joined([part.select(*alike) for part in parts], rows.axis).data if alike else {}
        if others:
            whole |= joined([self.held(part.select(*others), pool) for part in parts], rows.axis).data
        return Batch(rows.axis, rows.in_order(whole) | rows.columns())

    def _with_filled(
        self, part: Batch, columns: Mapping[str, tuple[Kind, Value]], call_options: CallOptions
    ) -> Batch:
        """Return the batch with filled columns. Columns with values per token are made where its tokens are."""
        of_tokens = {
            name: column
            for name, column in columns.items()
            if column[0].level is Level.TOKEN and isinstance(part.data.get("tokens"), RemoteColumn)
        }
        others = {name: column for name, column in columns.items() if name not in of_tokens}
        part = Batch(part.axis, part.data | filling(part, others))
        if not of_tokens:
            return part
        tokens = part.select("tokens")
        pool = self._nearest(tokens, HERE)
        split, arguments = self._split(tokens, pool), {"columns": of_tokens}
        answers = self.calls.run(pool, "filled", tokens, split, arguments, call_options, "cpu")
        return Batch(part.axis, part.data | self.calls.kept(pool, answers, split, part.axis).data)

    def per_row(self, batch: Batch) -> Batch:
        """Return the batch with each group's values repeated for every row of the group."""
        groups = [name for name, data in batch.data.items() if data.kind.level is Level.GROUP]
        if not groups:
            return batch
        here = self.fetch(batch.select(*groups))
        return Batch(batch.axis, batch.data | {name: per_row(here.data[name], batch.axis) for name in groups})

    # -- requests of the run

    def frozen(self, role: str) -> Any:
        """Return a copy of the role's current weights, for sampling with them after later updates."""
        return self.models[role].frozen()

    def lasting(self) -> Self:
        """Return an engine for columns that ranks keep until the driver has no batch with them any more."""
        later = copy.copy(self)
        later.lasts = True
        return later

    def packed(self, batch: Batch) -> bytes:
        """Pack the rows of the batch into bytes, for a checkpoint, with the ranks that store them."""
        batch = self.spread(batch, self.near(batch))
        home = self._home(batch, self._nearest(batch, HERE))
        return self._gathered(batch, RowRanks.of(home, len(batch)) if home else None).tobytes()

    def unpacked(self, payload: bytes, axis: Axis | None, pool: str | None) -> Batch:
        """Load bytes from ``packed`` onto the ranks of a pool, and return the batch.

        Each row returns to the rank that it was on. If the pool now has another number of ranks, the rows are
        balanced over them. ``axis``: the batch's row axis, by default the one stored in the bytes. ``pool``: a
        pool that this run doesn't have stands for its first one.
        """
        known = pool if pool is not None and pool in self.pools else next(iter(self.pools))
        rows, ranks = RowRanks.taken(opened(np.frombuffer(payload, np.uint8)))
        split = ranks.split(len(self.pools[known])) if ranks is not None else None
        return self.calls.spread(Batch(rows.axis if axis is None else axis, rows.data), known, split)

    def held(self, batch: Batch, pool: str | None) -> Batch:
        """Copy the batch within the ranks of a pool, and return it with the copied columns.

        Rows that are already on the pool stay on their rank. The copy is kept until the end of this engine's
        iteration. ``pool`` must not be None.
        """
        assert pool is not None
        there = self.pools[pool]
        split = self._home(batch, there) or self._split(batch, there)
        answers = self.calls.run(there, "hold", batch, split, {}, HERE, "io")
        return self.calls.kept(there, answers, split, batch.axis)

    def spread(self, batch: Batch, pool: str | None) -> Batch:
        """Return the batch with all its columns on workers. The driver's own columns are sent to ``pool``."""
        return self.calls.spread(batch, pool)

    def near(self, batch: Batch, call_options: CallOptions = HERE) -> str:
        """Return the name of the pool in ``call_options``, or else of the pool that has most of the batch."""
        return self._nearest(batch, call_options).name

    def joined(self, batches: list[Batch]) -> Batch:
        """Join the rows of several batches into one batch. Rows on workers stay there."""
        return joined(batches)

    def fetch(self, batch: Batch) -> Batch:
        """Return the batch with its columns copied into this process.

        Raises ValueError if a column on workers is larger than FETCHED bytes.
        """
        large = [
            name
            for name, data in batch.data.items()
            if isinstance(data, RemoteColumn) and data.nbytes > FETCHED
        ]
        if large:
            raise ValueError(
                f"fetch: found column '{large[0]}' of {batch.data[large[0]].nbytes} bytes, expected at "
                f"most {FETCHED}"
            )
        return self.gather(batch)

    def gather(self, batch: Batch) -> Batch:
        """Return the batch with its columns copied into this process, however large they are."""
        there = Batch(
            batch.axis, {name: data for name, data in batch.data.items() if isinstance(data, RemoteColumn)}
        )
        if not there.data:
            return batch
        return Batch(batch.axis, batch.data | opened(self._gathered(there)).data)

    def _gathered(self, batch: Batch, ranks: RowRanks | None = None) -> Payload:
        """Return the batch's rows as bytes, joined by a worker of the pool that has most of the batch.

        ``ranks``: the ranks of the rows, to be saved with them.
        """
        rows, arguments = torch.arange(len(batch)), {"ranks": ranks}
        payload: Payload = self.calls.on_one(
            self._nearest(batch, HERE), 0, "fetch", batch, rows, arguments, HERE, "io"
        ).value
        self._ledger.traffic.add("columns", payload.nbytes)
        return payload

    def on_output(self, on_output: Callable[[bytes], object]) -> None:
        """Set the function that receives the output of rewards on the workers.

        It is called with complete lines, as bytes, from several threads.
        """
        self._ledger.on_output = on_output

    def summarise(self, records: Mapping[str, Batch], judged: ScoredRecords = NO_REWARDS) -> IterationSummary:
        """Compute an iteration's summary on one worker, so that the driver doesn't need the columns.

        ``records``: name → the batch with that recorded column. ``judged``: which columns are scores from
        rewards. Scalars are skipped.
        """
        whole_records = _on_common_axes(
            {
                name: batch
                for name, batch in records.items()
                if batch.data[name].kind.level is not Level.SCALAR
            }
        )
        if not whole_records:
            return IterationSummary()
        largest = max(whole_records, key=lambda batch: sum(data.nbytes for data in batch.data.values()))
        pool = self._nearest(largest, HERE)
        keys: dict[int, tuple[str, ...]] = {}
        for batch in (self.spread(batch, pool.name) for batch in whole_records):
            answer = self.calls.on_one(pool, 0, "hold", batch, torch.arange(len(batch)), {}, HERE, "io")
            keys[answer.key] = tuple(batch.data)
        nothing = Batch(Axis.fresh(0), {})
        arguments = {"records": keys, "judged": judged}
        summary: IterationSummary = self.calls.on_one(
            pool, 0, "summarise", nothing, torch.arange(0), arguments, HERE
        ).value
        return summary

    def moved(self) -> dict[str, Any]:
        """Return metrics of the weight transfers and the offloading since the last call."""
        metrics = {
            f"{role}.sync/{name}": value
            for role, model in self.models.items()
            for name, value in model.moved.items()
        }
        for model in self.models.values():
            model.moved = {}
        return metrics | {
            f"{pool}.{name}": value for pool, most in self._kept().items() for name, value in most.items()
        }

    def traffic(self) -> dict[str, int]:
        """Return the bytes sent since the last call, by kind: columns, weights and in-memory checkpoints."""
        self._ledger.traffic.add("weights", sum(model.arrived() for model in self.models.values()))
        return self._ledger.traffic.take()

    def committed(self, size: int) -> None:
        """Count the ``size`` bytes of a trainer's state as part of an in-memory checkpoint."""
        self._ledger.traffic.add("commits", size)

    def _kept(self) -> dict[str, dict[str, float]]:
        """For each pool with limited memory, return metrics of offloading: the maximum over its ranks."""
        asked = {
            pool: self.pools[pool].call(Worker.moved, seconds=60.0, group="control") for pool in self.limited
        }
        answers = {pool: future.result() for pool, future in asked.items()}
        return {
            pool: {name: max(rank[name] for rank in ranks) for name in ranks[0]}
            for pool, ranks in answers.items()
        }

    def ran(self) -> list[RankSpan]:
        """Return the time spans during which ranks ran since the last call."""
        return self._ledger.ran()

    def finished(self) -> None:
        """Free this iteration's columns on all workers. Call this even after an error.

        Rows sampled ahead for later iterations are kept.
        """
        self._ledger.ended = max(self._ledger.ended, self.iteration - 1)
        for pool in self.pools.values():
            pool.mailbox.clear(self.iteration)
        limit = Deadline(CLEARED_SECONDS)
        # a dead worker has nothing to free, and the next call to it reports its death
        with contextlib.suppress(RemoteError):
            for pool in self.pools.values():
                refs = [
                    (
                        rank,
                        pool.send(rank, "clear", self.iteration, self._unused(pool, rank), group="control"),
                    )
                    for rank in range(len(pool))
                ]
                pool.future("clear", refs, CLEARED_SECONDS, list, limit).result()

    def _unused(self, pool: Pool[Worker], rank: int) -> list[int]:
        return self._ledger.take_unused(pool.at(rank))

    # -- splits
    # --------------------------------------------------------------------------------------------------------

    def _nearest(
        self, batch: Batch, call_options: CallOptions, among: Collection[str] | None = None
    ) -> Pool[Worker]:
        """Return the pool in ``call_options`` or, by default, the pool that stores most of the batch's bytes.

        ``among``: names of the pools to choose from, by default all.
        """
        if call_options.pool is not None:
            return self.pools[call_options.pool]
        nbytes = dict.fromkeys(self.pools, 0)
        for data in batch.data.values():
            for shard in data.layout.shards[:1] if isinstance(data, RemoteColumn) else ():
                nbytes[shard.at.pool] += data.nbytes
        return self.pools[
            max((name for name in nbytes if among is None or name in among), key=lambda name: nbytes[name])
        ]

    def _home(self, batch: Batch, pool: Pool[Worker]) -> list[Tensor] | None:
        """For each rank of ``pool``, return its rows of the largest column stored there, as indices.

        Returns None if the pool stores none of the batch's columns.
        """
        for data in sorted(batch.data.values(), key=lambda data: -data.nbytes):
            if (
                isinstance(data, RemoteColumn)
                and (split := data.layout.split(pool.name, len(pool))) is not None
            ):
                return split
        return None

    def _split(
        self, batch: Batch, pool: Pool[Worker], by_group: bool = False, parallel: Parallel = PLAIN
    ) -> list[Tensor]:
        tokens, ranks = row_tokens(batch.data, len(batch)), self._home(batch, pool)
        home = teams(ranks, parallel) if ranks is not None else None
        if home is not None and not by_group and off_balance(home, tokens) <= SLACK:
            return first_ranks(home, parallel)  # single rows are never divided, so the split can stay
        units = units_of_rows(batch.axis.slots if by_group else None, len(batch))
        split = (
            keep_or_balance(home, units, tokens)
            if home is not None
            else balanced(units, tokens, len(pool) // parallel.tensor)
        )
        return first_ranks(split, parallel)

    def _dispatched(self, stage: Stage, batch: Batch, pool: Pool[Worker], parallel: Parallel) -> list[Tensor]:
        """Return the indices of the rows that each rank gets under the stage's dispatch mode."""
        everything = torch.arange(len(batch))
        if stage.dispatch == ALL:
            return [everything] * len(pool)
        if stage.dispatch == DP_COMPUTE:
            return self._split(batch, pool, stage.rows == "group", parallel)
        assert stage.dispatch == RANK0
        return [everything]


def _repeated(split: Sequence[Tensor], samples: int) -> list[Tensor]:
    """Given the split of the prompts, return the indices of the rows that each rank samples."""
    return [(rows[:, None] * samples + torch.arange(samples)).reshape(-1) for rows in split]


def _on_common_axes(records: Mapping[str, Batch]) -> list[Batch]:
    """Group recorded columns into batches that share the same rows.

    Prompts, answers and episodes are repeated for each completion, because samples show them together. Data
    sources are repeated for each score, because scores are averaged by source.
    """
    shown_with = {"prompt": "completion", "answer": "completion", "episode": "completion", SOURCE: "scores"}
    batches: dict[int, Batch] = {}
    for name, batch in records.items():
        data, axis = batch.data[name], batch.axis
        main = records[shown_with[name]].axis if shown_with.get(name) in records else None
        index = axis.rows_of(main) if main is not None and axis is not main else None
        if index is not None and main is not None:
            data, axis = data.take(index, axis), main
        shared = batches.get(id(axis), Batch(axis, {}))
        batches[id(axis)] = Batch(axis, shared.data | {name: data})
    return list(batches.values())
