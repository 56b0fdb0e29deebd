"""The engine: the models, rewards and random seeds of a run, with a method for each kind of call.

Eager flows and compiled plans call the same engine, so they produce the same results.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from rlflow.author import methods
from rlflow.author.axis import Axis, FollowUpTokens
from rlflow.author.batch import Batch, Data, group_column
from rlflow.author.columns import CLOCK, Kind, Level
from rlflow.author.figures import Figure
from rlflow.author.loss import Loss
from rlflow.author.memory import NUMBER, Reducer
from rlflow.author.node_options import (
    ChooseOptions,
    ConcatOptions,
    DrawOptions,
    EncodeOptions,
    UpdateOptions,
)
from rlflow.author.seeds import derived
from rlflow.author.stage import Stage
from rlflow.compiler.spans import RankSpan
from rlflow.errors import listed
from rlflow.execution import episodes
from rlflow.execution.follow_ups import Asking, Roles, encoded_prompts, encoded_responses
from rlflow.execution.lineage import (
    UNFILLED,
    chosen_rows,
    cut_rows,
    filling,
    joined_rows,
    lacking,
    only_part,
    per_row,
)
from rlflow.execution.memory.buffers import KeptBuffer
from rlflow.execution.memory.prompt_draws import PromptDraws
from rlflow.execution.memory.tables import KeptTable
from rlflow.execution.offload_manager import OffloadManager
from rlflow.execution.role_model import RoleModel
from rlflow.execution.row_figures import NO_REWARDS, ScoredRecords
from rlflow.execution.row_ledger import UpdateRows
from rlflow.execution.summary import IterationSummary, summarise
from rlflow.execution.tally import PartialMetric, PartialMetrics
from rlflow.execution.wire.row_bytes import RowRanks, opened, packed
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.training.protocols import Sampling

Metrics = dict[Figure, float]
KeptMemory = KeptTable | KeptBuffer


class Scorer(Protocol):
    """Computes the scores of a reward role.

    It calls functions or models, or takes the score that an environment returned.
    """

    def __call__(self, batch: Batch) -> tuple[Tensor, PartialMetrics]:
        """Return the scores of the rows, and metrics.

        Scores are float32 [rows], or float64 in a float64 run. A missing score is NaN.
        """


@dataclass(frozen=True)
class CallOptions:
    """Options of a call that don't affect its result."""

    pool: str | None = None  # pool that the plan chose for the call, if it uses no model
    seconds: float = 1800.0  # deadline of the call
    # for a forward pass: whether the role's next update uses all these rows in its first step
    ahead: bool = False
    node: str = ""  # name of the node that makes the call, for the timeline and for messages


HERE = CallOptions()


@dataclass(frozen=True)
class FlowState:
    """What a flow carries over from one iteration to the next: its state scalars, and what it keeps."""

    scalars: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[str, KeptMemory] = field(default_factory=dict)


@dataclass(frozen=True)
class Chunks:
    """How many chunks to split sampled rows into, and which columns each chunk needs."""

    count: int
    names: tuple[str, ...]  # columns that readers of a chunk need


@dataclass
class Engine:
    """Runs the calls of a flow: a ``LocalEngine`` in one process, or a ``ClusterEngine`` on pools."""

    models: Mapping[str, RoleModel]  # by role
    scorers: Mapping[str, Scorer]  # by role
    seed: int
    fresh: Callable[[int], Batch]  # returns the next prompts in the data's order, given their number
    state: dict[str, float] = field(default_factory=dict)  # state of the flow, by name
    iteration: int = 0
    iterations: int = 1  # number of iterations of the run
    reward_timeout: float = 60.0  # seconds for each row of a reward
    # seconds after a node's deadline during which the engine can still report its own error
    grace: float = 0.0
    # role → weights from ``frozen``, which sampling uses instead of the newest weights
    weights: Mapping[str, Any] = field(default_factory=dict)
    # loads offloaded parts of models before a call that needs them
    offloads: OffloadManager = field(default_factory=OffloadManager)
    # dtype of numbers that the engine itself computes, such as the flow's state
    dtype: torch.dtype = torch.float32
    asking: Asking = field(default_factory=Asking)
    drawn: int | None = None  # number to derive seeds from, instead of the iteration
    # call → sampling settings of the run for `generate` in an eager flow
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # role → environments that answer the role between its turns
    environments: Mapping[str, EnvironmentPool] = field(default_factory=dict)
    memory: Mapping[str, KeptMemory] = field(default_factory=dict)  # what the flow keeps, by name
    draws: PromptDraws | None = None  # draws prompts by weight instead

    def take(self, count: int) -> Batch:
        """Return the next prompts of this iteration.

        They come in the data's order, or are drawn by weight. Of drawn prompts, there may be fewer than ``count``,
        and SkipIteration is raised if the iteration can't draw any.
        """
        if self.draws is None:
            return self.fresh(count)
        return self.draws.take(count, self.iteration, self.table(self.draws.by.table))

    def at(
        self,
        iteration: int,
        weights: Mapping[str, Any] | None = None,
        memory: Mapping[str, KeptMemory] | None = None,
    ) -> Self:
        """Return an engine for the calls of another iteration.

        It uses the seeds of ``iteration``, and keeps its columns until that iteration ends. ``weights``: for
        each role, the weights to sample with; roles that aren't listed use their newest weights. ``memory``:
        what the calls read, by default what the flow keeps now.
        """
        later = copy.copy(self)
        later.iteration, later.weights = iteration, weights or {}
        later.memory = self.memory if memory is None else memory
        return later

    def per_row(self, batch: Batch) -> Batch:
        """Return the batch with each group's values repeated for every row of the group."""
        return Batch(batch.axis, {name: per_row(data, batch.axis) for name, data in batch.data.items()})

    def lasting(self) -> Self:
        """Return an engine for columns that outlive the iteration.

        What its ``held`` and ``unpacked`` return stays stored as long as there is a batch with it.
        """
        return self

    @property
    def flow_state(self) -> FlowState:
        """A copy of what the flow carries over. Set it to go back to an earlier copy."""
        return FlowState(dict(self.state), dict(self.memory))

    @flow_state.setter
    def flow_state(self, flow_state: FlowState) -> None:
        self.state, self.memory = dict(flow_state.scalars), dict(flow_state.memory)

    def evaluating(self) -> Self:
        """Return an engine for an evaluation.

        Its seeds are the same in every evaluation, and differ from those of training.
        """
        other = copy.copy(self)
        other.seed, other.drawn = derived(self.seed, "evaluation"), 0
        return other

    def seed_of(self, call: int | str) -> int:
        """Return the seed of a call in this iteration.

        ``call``: the number of the call in program order, or the name of a draw from a buffer.
        """
        return derived(self.seed, self.iteration if self.drawn is None else self.drawn, call)

    def generate(
        self, role: str, prompts: Batch, sampling: Sampling, call: int, call_options: CallOptions = HERE
    ) -> Batch:
        """Sample ``sampling.samples`` rows for each prompt, and return them with the columns of `generate`.

        Rows of the same prompt are adjacent. ``call``: the number of the call in the iteration, which
        determines the seed.
        """
        return self.sample(role, prompts, sampling, self.seed_of(call), call_options)

    def sample(
        self, role: str, prompts: Batch, sampling: Sampling, seed: int, call_options: CallOptions = HERE
    ) -> Batch:
        """Sample ``sampling.samples`` rows per prompt with the newest weights. Equal seeds give equal rows."""
        raise NotImplementedError

    def sampled_columns(self, role: str) -> tuple[str, ...]:
        """Return the names of the columns of rows sampled by a role."""
        return (
            *methods.GENERATE_GIVES,
            "group",
            *(methods.EPISODE_GIVES if role in self.environments else ()),
        )

    def to_sample(self, role: str, prompts: Batch) -> Batch:
        """Return the prompts with only the columns that the role needs for sampling."""
        own = (
            episodes.read_columns(prompts.data, self.environments[role]) if role in self.environments else ()
        )
        return reads(tuple(dict.fromkeys(("prompt_tokens", "prefix_length", *own))), prompts)

    def chunks(
        self,
        role: str,
        prompts: Batch,
        sampling: Sampling,
        call: int,
        into: Chunks,
        call_options: CallOptions = HERE,
    ) -> Iterator[Batch]:
        """Sample like ``generate``, but yield the rows in chunks as soon as they are sampled.

        After the chunks, one last batch with all rows is yielded. ``into``: how many chunks, and their
        columns.
        """
        yield from self.sample_chunks(role, prompts, sampling, self.seed_of(call), into, call_options)

    def sample_chunks(
        self,
        role: str,
        prompts: Batch,
        sampling: Sampling,
        seed: int,
        into: Chunks,
        call_options: CallOptions = HERE,
    ) -> Iterator[Batch]:
        """Sample from the given seed and yield the rows in chunks, as ``chunks`` does.

        Equal seeds give equal rows. The axis of each chunk is a selection from the axis of all rows. After
        the chunks, one last batch with all rows is yielded.
        """
        raise NotImplementedError

    def in_order(self, pieces: Sequence[Batch]) -> Batch:
        """Join batches that are selections from one axis, and put their rows in the order of that axis.

        Raises ValueError if a row of the axis is missing or appears twice.
        """
        axis = pieces[0].axis.parent
        index = torch.cat([piece.axis.index for piece in pieces if piece.axis.index is not None])
        if axis is None or not torch.equal(index.sort().values, torch.arange(len(axis))):
            raise ValueError(
                f"found {len(index)} rows in {len(pieces)} chunks, expected each of {len(axis or ())} once"
            )
        joined = self.joined([piece for piece in pieces if len(piece)] or [pieces[0]])
        return Batch(axis, joined.rows(index.argsort()).data)

    def forward(
        self, role: str, want: tuple[str, ...], batch: Batch, call_options: CallOptions = HERE
    ) -> Batch:
        """Run a forward pass of the role's trainer over the rows, and return the columns ``want``.

        ``want``: the quantities to compute, such as ``logprobs``.
        """
        raise NotImplementedError

    def score(self, role: str, batch: Batch, call_options: CallOptions = HERE) -> Batch:
        """Return the column ``logprobs``, computed by the role's generator for the tokens of the rows.

        The generator first gets the trainer's newest weights.
        """
        raise NotImplementedError

    def reward(
        self, role: str, batch: Batch, call_options: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """Score the rows. Return the column ``scores``, and metrics such as the number of missing scores.

        Rows whose episode failed aren't passed to the reward, and get no score.
        """
        raise NotImplementedError

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
        """Train the role on the rows.

        ``settings``: the settings of the loss. ``call``: the number of the call in the iteration. ``fresh``:
        whether to reset the optimizer first. Returns metrics, and for each row whether the update learned
        from it.
        """
        raise NotImplementedError

    def follow(
        self, role: str, other: str, mix: float, stepped: bool, call_options: CallOptions = HERE
    ) -> PartialMetrics:
        """Move a role's weights towards those of the role ``other``, by the share ``mix``, and return metrics.

        ``stepped``: whether ``other`` took an optimizer step in this iteration. Otherwise, nothing moves. The
        metric is 1 if the weights moved, or else 0.
        """
        if stepped:
            self.move(role, other, mix, call_options)
            self.models[role].version += 1
        return {"moved": PartialMetric.sum(float(stepped))}

    def move(self, role: str, other: str, mix: float, call_options: CallOptions = HERE) -> None:
        """Move the weights of a role's trainer towards those of another role's trainer."""
        raise NotImplementedError

    def stage(
        self,
        stage: Stage,
        batch: Batch,
        settings: Mapping[str, Any],
        call: int,
        call_options: CallOptions = HERE,
    ) -> tuple[Batch, PartialMetrics]:
        """Run a stage on the rows. Return its output columns and its partial metrics."""
        raise NotImplementedError

    def may_change(self, stage: Stage) -> None:
        """Increase the weight version of a stage's role if the stage may change the weights.

        Any stage with side effects may. The generator then gets the weights again before it next samples.
        """
        if stage.on and not stage.pure:
            self.models[stage.on].version += 1

    def keep(self, scalars: Mapping[str, float], memory: Mapping[str, KeptMemory]) -> None:
        """End an iteration of the flow: take over the scalars that it set, and what it wrote."""
        self.state |= scalars
        self.memory = {**self.memory, **memory}

    def table(self, name: str) -> KeptTable:
        """Return the table that the flow keeps under this name."""
        table = self.memory[name]
        assert isinstance(table, KeptTable)
        return table

    def buffer(self, name: str) -> KeptBuffer:
        """Return the buffer that the flow keeps under this name."""
        kept = self.memory[name]
        assert isinstance(kept, KeptBuffer)
        return kept

    def draw(self, name: str, node: str, options: DrawOptions) -> tuple[Batch, Tensor, PartialMetrics]:
        """Draw rows from the buffer ``name``.

        ``node``: the name of the call, which determines the seed. Returns the rows, their numbers for
        ``KeptBuffer.after_draw``, and metrics: the number of rows, and the means of their age and of how often
        they were drawn before.
        """
        kept = self.buffer(name)
        which = kept.chosen(self.iteration, self.seed_of(node), options)
        rows = kept.rows(self, which, self.iteration)
        entries = kept.entries.take(which)
        ages = {"age": self.iteration - entries.sampled, "drawn": entries.drawn} if len(which) else {}
        metrics: dict[str | Figure, PartialMetric] = {"rows": PartialMetric.sum(float(len(which)))}
        metrics |= {each: PartialMetric.of(values.double()) for each, values in ages.items()}
        return rows, entries.row, metrics

    def put(self, before: KeptBuffer, batch: Batch) -> tuple[KeptBuffer, PartialMetrics]:
        """Return a buffer as it will be after this iteration has put a batch, and metrics. Nothing changes yet.

        The metrics are the numbers of rows that the buffer has, that were put, and that left it, by cause.
        """
        after = before.after_put(self, batch, self.iteration)
        gone = {
            cause: getattr(after.totals, cause).rows - getattr(before.totals, cause).rows
            for cause in ("age", "room", "choice")
        }
        sizes = {"rows": len(after), "put": len(batch)} | {f"left_{cause}": gone[cause] for cause in gone}
        return after, {size: PartialMetric.sum(float(count)) for size, count in sizes.items()}

    def read(self, name: str, batch: Batch, call_options: CallOptions = HERE) -> Batch:
        """Return the columns of the table ``name`` for the rows of a batch, whose column ``key`` has the keys."""
        columns = self.table(name).read(self.gather(batch)["key"])
        result = Batch(batch.axis, {column: Data(NUMBER, value) for column, value in columns.items()})
        return self.spread(result, self.near(batch, call_options))

    def write(
        self, name: str, batch: Batch, reducers: Mapping[str, Reducer]
    ) -> tuple[KeptTable, PartialMetrics]:
        """Return the table ``name`` as it will be after this iteration, and metrics. Nothing changes yet.

        ``batch``: the keys in the column ``key``, and the columns to write. ``reducers``: by column. The
        metrics are the number of keys in the table, and of keys that are new.
        """
        rows, before = self.gather(batch), self.table(name)
        columns = {column: rows[column] for column in reducers}
        after = before.written(self.iteration, rows["key"], columns, reducers, batch.axis.keys)
        sizes = {"keys": len(after), "new_keys": len(after) - len(before)}
        return after, {size: PartialMetric.sum(float(count)) for size, count in sizes.items()}

    def spread(self, batch: Batch, pool: str | None) -> Batch:
        """Move a batch from this process to a pool. With a single process, return it unchanged."""
        return batch

    def near(self, batch: Batch, call_options: CallOptions = HERE) -> str | None:
        """Return the pool that stores most of the rows, or None with a single process."""
        return None

    def held(self, batch: Batch, pool: str | None) -> Batch:
        """Keep a batch stored until this engine's iteration ends, and return it."""
        return batch

    def frozen(self, role: str) -> Any:
        """Return the role's current weights in a form that a later call can sample with."""
        raise NotImplementedError("one process samples with the newest weights")

    def packed(self, batch: Batch) -> bytes:
        """Return the batch as bytes for a checkpoint. Equal batches give equal bytes."""
        return packed(batch).tobytes()

    def unpacked(self, payload: bytes, axis: Axis | None, pool: str | None) -> Batch:
        """Restore a batch from the bytes that ``packed`` returned, and place it on a pool.

        ``axis``: the row axis of the batch, or None to create a new one. The bytes may come from a run with
        other pools.
        """
        rows, _ = RowRanks.taken(opened(np.frombuffer(payload, np.uint8)))
        return rows if axis is None else Batch(axis, rows.data)

    def joined(self, batches: list[Batch]) -> Batch:
        """Concatenate batches into one."""
        return Batch.concat(batches)

    def on_output(self, on_output: Callable[[bytes], object]) -> None:
        """Register a function to be called with the output of reward processes.

        With a single process, there is no such output.
        """

    def summarise(self, records: Mapping[str, Batch], judged: ScoredRecords = NO_REWARDS) -> IterationSummary:
        """Summarize the columns that an iteration recorded.

        ``records``: for each name, a batch with this column. ``judged``: which of these columns are scores or
        depend on scores.
        """
        return summarise(records, judged)

    def fetch(self, batch: Batch) -> Batch:
        """Copy the batch's values into this process and return the batch."""
        return batch

    def gather(self, batch: Batch) -> Batch:
        """Copy the batch's values into this process, however large they are, and return the batch.

        Used to record evaluations.
        """
        return batch

    def moved(self) -> dict[str, Any]:
        """Return metrics of the weight transfers and moved model parts since the last call of this method."""
        return self.offloads.moved()

    def traffic(self) -> dict[str, int]:
        """Return the bytes that processes have sent each other since the last call of this method, by kind.

        Empty with a single process.
        """
        return {}

    def ran(self) -> list[RankSpan]:
        """Return the spans of calls that pool ranks have run since the last call of this method.

        Empty with a single process.
        """
        return []

    def finished(self) -> None:
        """End the iteration and free everything that only it uses. Also called after an error."""

    def state_batch(self, batch: Batch) -> Batch:
        """Return the flow's state, ``iteration`` and ``progress`` as scalar columns for the batch's rows."""
        return Batch(
            batch.axis, self.clock() | {name: self.state_data(value) for name, value in self.state.items()}
        )

    def clock(self) -> dict[str, Data]:
        """Return the scalar columns ``iteration`` and ``progress``."""
        number = Data(Kind(Level.SCALAR, "int64"), torch.tensor(self.iteration))
        return dict(zip(CLOCK, (number, self.state_data(self.iteration / self.iterations)), strict=True))

    def state_data(self, value: float) -> Data:
        """Return the value of a state scalar as a column."""
        return Data(
            Kind(Level.SCALAR, str(self.dtype).removeprefix("torch.")), torch.tensor(value, dtype=self.dtype)
        )

    def ask(
        self, batch: Batch, roles: Roles, call_options: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """Return follow-up prompts, and a metric that counts the prompts dropped for being too long.

        If the batch has the column ``until``, the prompts continue responses from the places it selects.
        Otherwise, each row's ``text`` becomes a prompt. The prompts have an axis of their own. ``roles``: the
        roles that sample from the prompts.
        """
        rows, cut = self._prompts(batch, roles, call_options)
        lengths = rows.data["prompt_tokens"].row_lengths
        short = (lengths <= self.asking.longest).nonzero()[:, 0]
        axis = batch.axis.ask(
            rows.axis.back_to(batch.axis)[short], cut.take(short) if cut is not None else None
        )
        asked = Batch(axis, {name: data.take(short, rows.axis) for name, data in rows.data.items()})
        return asked, {"too_long": PartialMetric.sum(float(len(rows) - len(short)))}

    def _prompts(
        self, batch: Batch, roles: Roles, call_options: CallOptions
    ) -> tuple[Batch, FollowUpTokens | None]:
        if "until" not in batch:
            return self.encoded(batch, roles, call_options), None
        rows, place = self.cut(batch, call_options)
        return rows, FollowUpTokens(place, batch.data["tokens"].row_lengths) if batch.data[
            "until"
        ].kind.level is Level.TOKEN else None

    def encoded(self, batch: Batch, roles: Roles, call_options: CallOptions = HERE) -> Batch:
        """Make a follow-up prompt of each row's ``text``: the columns ``prompt`` and ``prompt_tokens``.

        If the rows have responses, the text is appended to the row's prompt and response.
        """
        return encoded_prompts(self.asking, batch, roles)

    def cut(self, batch: Batch, call_options: CallOptions = HERE) -> tuple[Batch, Tensor]:
        """Return prompts that continue responses, and how many response tokens each has. See ``cut_rows``."""
        return cut_rows(batch)

    def encode(
        self, batch: Batch, options: EncodeOptions, call_options: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """Return rows whose responses are the texts in the column ``text``, and metrics.

        The metrics count the rows dropped because their text is empty, or because the response is longer than
        ``options`` allow, or doesn't fit into the model together with its prompt.
        """
        rows = self.responses(batch, options.roles, call_options)
        lengths = rows.data["tokens"].row_lengths
        empty = lengths == 0
        long = lengths + batch.data["prompt_tokens"].row_lengths > self.asking.longest_row
        if options.max_tokens is not None:
            long |= lengths > options.max_tokens
        index = (~empty & ~long).nonzero()[:, 0]
        axis = batch.axis.encode(index)
        data = {name: data.take(index, rows.axis) for name, data in rows.data.items()}
        return Batch(axis, data | {"group": group_column(axis)}), {
            "empty": PartialMetric.sum(float(empty.sum())),
            "too_long": PartialMetric.sum(float(long.sum())),
        }

    def responses(self, batch: Batch, roles: Roles, call_options: CallOptions = HERE) -> Batch:
        """Make a response of each row's ``text``. See ``encoded_responses``."""
        return encoded_responses(self.asking, batch, roles)

    def choose(self, batch: Batch, options: ChooseOptions) -> tuple[Batch, PartialMetrics]:
        """Return the rows that ``options`` selects by the column ``by``, without columns, and metrics.

        The metric ``dropped`` counts the rows that weren't selected.
        """
        by = self.fetch(batch)["by"]
        index = chosen_rows(by, batch.axis, options)
        return Batch(batch.axis.take(index), {}), {
            "dropped": PartialMetric.sum(float(len(batch) - len(index)))
        }

    def concat(
        self, parts: Sequence[Batch], options: ConcatOptions = UNFILLED, call_options: CallOptions = HERE
    ) -> Batch:
        """Concatenate batches into one, with the columns that all have or that ``options`` fill.

        If only one of them has rows, these stay as they are.
        """
        parts = [Batch(part.axis, part.data | filling(part, lacking(part, parts, options))) for part in parts]
        part = only_part(parts, options)
        return joined_rows(parts, options) if part is None else part


def whole(rows: Batch, count: int, names: tuple[str, ...]) -> Batch:
    """Check the rows that a backend returned, and return them unchanged.

    Raises ValueError if there aren't ``count`` rows, or if one of the columns ``names`` is missing.
    """
    missing = [name for name in names if name not in rows]
    if len(rows) != count or missing:
        also = f" with {listed(missing)}" if missing else ""
        raise ValueError(f"found {len(rows)} rows of {listed(rows.data)}, expected {count} rows{also}")
    return rows


def reads(names: tuple[str, ...], batch: Batch) -> Batch:
    """Return the batch with only those of its columns that are in ``names``."""
    return batch.select(*(name for name in names if name in batch))


def model_reads(batch: Batch, *optional: str) -> Batch:
    """Return the batch with only the columns that a model reads.

    These are ``prompt_tokens``, ``tokens``, and any of the columns ``optional`` that the batch has.
    """
    return batch.select(*methods.MODEL_READS, *(name for name in optional if name in batch))
