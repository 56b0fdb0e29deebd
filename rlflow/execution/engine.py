"""The engine: models, rewards and RNG of a run, with one method per kind of call.

Eager flows and compiled plans call the same engine, so their results are the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from rlflow.author import methods
from rlflow.author.axis import Axis, FollowUpTokens
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import CLOCK, Kind, Level
from rlflow.author.figures import Figure
from rlflow.author.loss import Loss
from rlflow.author.node_options import ChooseOptions, UpdateOptions
from rlflow.author.seeds import derived
from rlflow.author.stage import Stage
from rlflow.compiler.spans import RankSpan
from rlflow.errors import listed
from rlflow.execution import episodes
from rlflow.execution.account import UpdateRows
from rlflow.execution.follow_ups import Asking, Roles, encoded_prompts
from rlflow.execution.lineage import chosen_rows, cut_rows, joined_rows
from rlflow.execution.offload_manager import OffloadManager
from rlflow.execution.role_model import RoleModel
from rlflow.execution.row_figures import NO_REWARDS, ScoredRecords
from rlflow.execution.summary import IterationSummary, summarise
from rlflow.execution.tally import PartialMetric, PartialMetrics
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.training.protocols import Sampling

Metrics = dict[Figure, float]


class Scorer(Protocol):
    """A reward that is bound to a reward role: functions, models, or the score of an environment."""

    def __call__(self, batch: Batch) -> tuple[Tensor, PartialMetrics]:
        """Return the scores of rows, and metrics.

        Scores: [rows], float32, or float64 in a float64 run; NaN for a missing score.
        """


@dataclass(frozen=True)
class CallOptions:
    """Options of one call that do not change its result."""

    pool: str | None = None  # pool that the plan chose for the call, if it uses no model
    seconds: float = 1800.0  # deadline of the call
    # for a forward pass: whether the role's next update uses all these rows in its first step
    ahead: bool = False
    node: str = ""  # name of the node that makes the call, for the timeline and for messages


HERE = CallOptions()


@dataclass(frozen=True)
class Chunks:
    """How many chunks the rows of a call are sampled in, and which columns each chunk needs."""

    count: int
    names: tuple[str, ...]  # columns that readers of a chunk need


@dataclass
class Engine:
    """Runs the calls of a run: a ``LocalEngine`` in one process, or a ``ClusterEngine`` on pools."""

    models: Mapping[str, RoleModel]  # by role
    scorers: Mapping[str, Scorer]  # by role
    seed: int
    fresh: Callable[[int], Batch]  # takes more prompts from the data, given their number
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

    def at(self, iteration: int, weights: Mapping[str, Any] | None = None) -> Self:
        """Return an engine for the calls of a later iteration.

        It uses the seeds of that iteration, and its columns are kept until that iteration ends. ``weights``:
        role → weights to sample with; other roles use the newest weights.
        """
        later = copy.copy(self)
        later.iteration, later.weights = iteration, weights or {}
        return later

    def evaluating(self) -> Self:
        """Return an engine for an evaluation.

        Its seeds are the same in each evaluation, and differ from the seeds of training.
        """
        other = copy.copy(self)
        other.seed, other.drawn = derived(self.seed, "evaluation"), 0
        return other

    def seed_of(self, call: int) -> int:
        """Return the seed of the n-th call of this iteration."""
        return derived(self.seed, self.iteration if self.drawn is None else self.drawn, call)

    def generate(
        self, role: str, prompts: Batch, sampling: Sampling, call: int, call_options: CallOptions = HERE
    ) -> Batch:
        """Return sampled rows with the columns of `generate`.

        The ``samples`` rows of a prompt are adjacent. ``call``: the number of the call in the iteration.
        """
        return self.sample(role, prompts, sampling, self.seed_of(call), call_options)

    def sample(
        self, role: str, prompts: Batch, sampling: Sampling, seed: int, call_options: CallOptions = HERE
    ) -> Batch:
        """Sample rows from prompts with the newest weights. Equal seeds give equal rows."""
        raise NotImplementedError

    def sampled_columns(self, role: str) -> tuple[str, ...]:
        """Return the names of the columns that sampling from a role returns."""
        return (
            *methods.GENERATE_GIVES,
            "group",
            *(methods.EPISODE_GIVES if role in self.environments else ()),
        )

    def to_sample(self, role: str, prompts: Batch) -> Batch:
        """Return the columns of prompts that sampling from a role reads."""
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
        """Sample like ``generate``, but yield chunks of rows as soon as they are complete.

        The last batch that is yielded has all rows.
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
        """Sample rows in chunks, like ``chunks``. Equal seeds give equal rows.

        The axis of each chunk is a selection from the axis of all rows.
        """
        raise NotImplementedError

    def in_order(self, pieces: Sequence[Batch]) -> Batch:
        """Join batches that together contain each row of one axis, in the order of that axis.

        Raises ValueError if a row is missing or appears twice.
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
        """Run a role's trainer forward over rows, and return the wanted columns.

        ``want``: the quantities to return, such as logprobs.
        """
        raise NotImplementedError

    def score(self, role: str, batch: Batch, call_options: CallOptions = HERE) -> Batch:
        """Return the column `logprobs` of given tokens from the role's generator.

        The generator first gets the trainer's newest weights.
        """
        raise NotImplementedError

    def reward(
        self, role: str, batch: Batch, call_options: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """Score rows. Return the column ``scores``, and metrics with the number of missing scores.

        A row whose episode failed is not passed to the reward and has a missing score.
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
    ) -> tuple[PartialMetrics, UpdateRows]:
        """Train a role on rows, or do nothing if the update is not due in this iteration.

        ``settings``: the settings of the loss. Returns metrics, and the result for each row.
        """
        if self.iteration < options.after:
            rows = torch.zeros(len(batch), dtype=torch.int64)
            return {}, UpdateRows(rows, loss.signature.column_names, waits=True)
        return self.learn(role, batch, loss, options, settings, call, call_options)

    def learn(
        self,
        role: str,
        batch: Batch,
        loss: Loss,
        options: UpdateOptions,
        settings: Mapping[str, Any],
        call: int,
        call_options: CallOptions = HERE,
    ) -> tuple[PartialMetrics, UpdateRows]:
        """Run an update that is due. Parameters and results are as in ``update``."""
        raise NotImplementedError

    def stage(
        self,
        stage: Stage,
        batch: Batch,
        settings: Mapping[str, Any],
        call: int,
        call_options: CallOptions = HERE,
    ) -> tuple[Batch, PartialMetrics]:
        """Run a stage on rows. Returns its columns and its partial metrics."""
        raise NotImplementedError

    def may_change(self, stage: Stage) -> None:
        """Count a stage with side effects as an update of its role, because it may change the weights.

        The generator then gets the weights again.
        """
        if stage.on and not stage.pure:
            self.models[stage.on].version += 1

    def spread(self, batch: Batch, pool: str | None) -> Batch:
        """Place the driver's columns of a batch on a pool; in one process, return the batch unchanged."""
        return batch

    def near(self, batch: Batch, call_options: CallOptions = HERE) -> str | None:
        """Return the pool that has most of the rows; None in one process."""
        return None

    def held(self, batch: Batch, pool: str | None) -> Batch:
        """Return the batch, stored until the iteration of this engine has ended."""
        return batch

    def frozen(self, role: str) -> Any:
        """Return the role's current weights in a form that can be sampled with later."""
        raise NotImplementedError("one process samples with the newest weights")

    def packed(self, batch: Batch) -> bytes:
        """Return columns as bytes for a checkpoint."""
        raise NotImplementedError("one process samples nothing ahead")

    def unpacked(self, payload: bytes, axis: Axis | None, pool: str | None) -> Batch:
        """Load a batch that ``packed`` returned, and place it on a pool.

        ``axis``: the row axis of the batch; None makes a new axis.
        """
        raise NotImplementedError("one process samples nothing ahead")

    def joined(self, batches: list[Batch]) -> Batch:
        """Join the rows of all batches, one batch after another."""
        return Batch.concat(batches)

    def on_output(self, on_output: Callable[[bytes], object]) -> None:
        """Register a function that gets the output of rewards in other processes.

        In one process there is none.
        """

    def summarise(self, records: Mapping[str, Batch], judged: ScoredRecords = NO_REWARDS) -> IterationSummary:
        """Summarise the recorded columns of an iteration.

        ``records``: column name → batch with the column. ``judged``: which columns are scores.
        """
        return summarise(records, judged)

    def fetch(self, batch: Batch) -> Batch:
        """Return the batch with its values in this process."""
        return batch

    def gather(self, batch: Batch) -> Batch:
        """Return the batch with its values in this process, regardless of its size.

        A run uses this method to record evaluations.
        """
        return batch

    def moved(self) -> dict[str, Any]:
        """Return metrics since the last call: weight transfers, and offloaded and loaded parts of models."""
        return self.offloads.moved()

    def traffic(self) -> dict[str, int]:
        """Return the bytes sent between processes since the last call, by kind; empty in one process."""
        return {}

    def ran(self) -> list[RankSpan]:
        """Return the time spans in which ranks of pools ran calls since this method was last called.

        Empty in one process.
        """
        return []

    def finished(self) -> None:
        """End the iteration, also after an error, and free everything that only this iteration uses."""

    def state_batch(self, batch: Batch) -> Batch:
        """Return the flow's state and the iteration clock as scalar columns over the batch's rows."""
        return Batch(
            batch.axis, self.clock() | {name: self.state_data(value) for name, value in self.state.items()}
        )

    def clock(self) -> dict[str, Data]:
        """Return the columns of the iteration clock."""
        number = Data(Kind(Level.SCALAR, "int64"), torch.tensor(self.iteration))
        return dict(zip(CLOCK, (number, self.state_data(self.iteration / self.iterations)), strict=True))

    def state_data(self, value: float) -> Data:
        """Return a number of the state as a column."""
        return Data(
            Kind(Level.SCALAR, str(self.dtype).removeprefix("torch.")), torch.tensor(value, dtype=self.dtype)
        )

    def ask(
        self, batch: Batch, roles: Roles, call_options: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """Make a follow-up prompt from each row's ``text``, or for each position in the column ``until``.

        Returns the prompts over an axis of their own, without prompts that are too long, and a metric with
        the number of dropped prompts. ``roles``: the roles that sample from the prompts.
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
        """Return the columns ``prompt`` and ``prompt_tokens`` for each row's ``text``.

        If the rows have responses, the text continues after the row's prompt and response.
        """
        return encoded_prompts(self.asking, batch, roles)

    def cut(self, batch: Batch, call_options: CallOptions = HERE) -> tuple[Batch, Tensor]:
        """Return the beginnings of rows to continue from, as ``cut_rows`` does."""
        return cut_rows(batch)

    def choose(self, batch: Batch, options: ChooseOptions) -> tuple[Batch, PartialMetrics]:
        """Return the rows that the column ``by`` chooses, without columns, and metrics.

        The metric ``dropped`` is the number of rows that were not chosen.
        """
        by = self.fetch(batch)["by"]
        index = chosen_rows(by, batch.axis, options)
        return Batch(batch.axis.take(index), {}), {
            "dropped": PartialMetric.sum(float(len(batch) - len(index)))
        }

    def concat(self, parts: Sequence[Batch], call_options: CallOptions = HERE) -> Batch:
        """Join the rows of all parts, which have the same columns."""
        return joined_rows(parts)


def whole(rows: Batch, count: int, names: tuple[str, ...]) -> Batch:
    """Return a batch from a backend, after checking it.

    Raises ValueError if it does not have ``count`` rows or lacks one of the columns ``names``.
    """
    missing = [name for name in names if name not in rows]
    if len(rows) != count or missing:
        also = f" with {listed(missing)}" if missing else ""
        raise ValueError(f"found {len(rows)} rows of {listed(rows.data)}, expected {count} rows{also}")
    return rows


def reads(names: tuple[str, ...], batch: Batch) -> Batch:
    """Return those of the columns ``names`` that the batch has."""
    return batch.select(*(name for name in names if name in batch))


def model_reads(batch: Batch, *optional: str) -> Batch:
    """Return the columns that a model reads: prompt_tokens, tokens, and the optional columns if present."""
    return batch.select(*methods.MODEL_READS, *(name for name in optional if name in batch))
