"""The engine: the models, rewards and random seeds of a run, with a method for each kind of call.

Eager flows and compiled plans call the same engine, so their results are equal.
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
from rlflow.execution.follow_ups import Asking, Roles, encoded_prompts
from rlflow.execution.lineage import chosen_rows, cut_rows, joined_rows
from rlflow.execution.offload_manager import OffloadManager
from rlflow.execution.role_model import RoleModel
from rlflow.execution.row_figures import NO_REWARDS, ScoredRecords
from rlflow.execution.row_ledger import UpdateRows
from rlflow.execution.summary import IterationSummary, summarise
from rlflow.execution.tally import PartialMetric, PartialMetrics
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.training.protocols import Sampling

Metrics = dict[Figure, float]


class Scorer(Protocol):
    """The object that computes the scores of a reward role.

    It calls functions or models, or takes the score that an environment gave.
    """

    def __call__(self, batch: Batch) -> tuple[Tensor, PartialMetrics]:
        """Return the scores of the rows, and metrics.

        The scores are [rows], float32, or float64 in a float64 run. A missing score is NaN.
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
    """Into how many chunks sampled rows are divided, and which columns each chunk needs."""

    count: int
    names: tuple[str, ...]  # columns that readers of a chunk need


@dataclass
class Engine:
    """Runs the calls of a flow: a ``LocalEngine`` in one process, or a ``ClusterEngine`` on pools."""

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
        """Return an engine for the calls of another iteration.

        It uses the seeds of ``iteration``, and keeps its columns until this iteration ends. ``weights``: role
        → weights to sample with; other roles sample with the newest weights.
        """
        later = copy.copy(self)
        later.iteration, later.weights = iteration, weights or {}
        return later

    def evaluating(self) -> Self:
        """Return an engine for an evaluation.

        Its seeds are equal in every evaluation, and differ from the seeds of training.
        """
        other = copy.copy(self)
        other.seed, other.drawn = derived(self.seed, "evaluation"), 0
        return other

    def seed_of(self, call: int) -> int:
        """Return the seed of a call in this iteration. ``call``: the number of the call in program order."""
        return derived(self.seed, self.iteration if self.drawn is None else self.drawn, call)

    def generate(
        self, role: str, prompts: Batch, sampling: Sampling, call: int, call_options: CallOptions = HERE
    ) -> Batch:
        """Sample ``sampling.samples`` rows for each prompt. Return the rows with the columns of `generate`.

        The rows of a prompt are adjacent. ``call``: the number of the call in the iteration, from which the
        seed is derived.
        """
        return self.sample(role, prompts, sampling, self.seed_of(call), call_options)

    def sample(
        self, role: str, prompts: Batch, sampling: Sampling, seed: int, call_options: CallOptions = HERE
    ) -> Batch:
        """Sample ``sampling.samples`` rows for each prompt with the newest weights.

        If the seeds of two calls are equal, their rows are equal.
        """
        raise NotImplementedError

    def sampled_columns(self, role: str) -> tuple[str, ...]:
        """Return the names of the columns that a role's sampled rows have."""
        return (
            *methods.GENERATE_GIVES,
            "group",
            *(methods.EPISODE_GIVES if role in self.environments else ()),
        )

    def to_sample(self, role: str, prompts: Batch) -> Batch:
        """Return the prompts with only the columns that sampling from the role reads."""
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
        """Sample like ``generate``, but yield chunks of rows as soon as they are sampled.

        The last batch that is yielded contains all rows. ``into``: the number of chunks, and their columns.
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
        """Sample rows and yield them in chunks, as ``chunks`` does, from the given seed.

        If the seeds of two calls are equal, their rows are equal. The axis of each chunk is a selection from
        the axis of all rows. The last batch that is yielded contains all rows.
        """
        raise NotImplementedError

    def in_order(self, pieces: Sequence[Batch]) -> Batch:
        """Join batches that are selections from one axis, in the order of this axis.

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
        """Run a forward pass of the role's trainer over the rows. Return the columns ``want``.

        ``want``: quantities such as ``logprobs``.
        """
        raise NotImplementedError

    def score(self, role: str, batch: Batch, call_options: CallOptions = HERE) -> Batch:
        """Return the column ``logprobs`` of the rows' tokens, computed by the role's generator.

        The generator first gets the trainer's newest weights.
        """
        raise NotImplementedError

    def reward(
        self, role: str, batch: Batch, call_options: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """Score the rows. Return the column ``scores``, and metrics with the number of missing scores.

        If the episode of a row failed, the reward does not get the row, and its score is missing.
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
        """Train the role on the rows. Do nothing if the update is not due in this iteration.

        ``settings``: the settings of the loss. ``call``: the number of the call in the iteration. Returns
        metrics, and for each row whether the update learned from it.
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
        """Run an update that is due. Parameters and results are those of ``update``."""
        raise NotImplementedError

    def stage(
        self,
        stage: Stage,
        batch: Batch,
        settings: Mapping[str, Any],
        call: int,
        call_options: CallOptions = HERE,
    ) -> tuple[Batch, PartialMetrics]:
        """Run a stage on the rows. Return the columns that it gives, and its partial metrics."""
        raise NotImplementedError

    def may_change(self, stage: Stage) -> None:
        """Increase the version of the weights of a stage's role, if the stage may change them.

        A stage with side effects may change them. The generator then gets the weights again before it
        samples.
        """
        if stage.on and not stage.pure:
            self.models[stage.on].version += 1

    def spread(self, batch: Batch, pool: str | None) -> Batch:
        """Place a batch of this process on a pool. In one process, return the batch unchanged."""
        return batch

    def near(self, batch: Batch, call_options: CallOptions = HERE) -> str | None:
        """Return the pool that stores most of the rows; None in one process."""
        return None

    def held(self, batch: Batch, pool: str | None) -> Batch:
        """Return the batch, which is then stored until the iteration of this engine ends."""
        return batch

    def frozen(self, role: str) -> Any:
        """Return the role's current weights in a form with which a later call can sample."""
        raise NotImplementedError("one process samples with the newest weights")

    def packed(self, batch: Batch) -> bytes:
        """Return the batch as bytes for a checkpoint."""
        raise NotImplementedError("one process samples nothing ahead")

    def unpacked(self, payload: bytes, axis: Axis | None, pool: str | None) -> Batch:
        """Return the batch that ``packed`` returned as ``payload``, placed on a pool.

        ``axis``: the row axis of the batch; None makes a new axis.
        """
        raise NotImplementedError("one process samples nothing ahead")

    def joined(self, batches: list[Batch]) -> Batch:
        """Return one batch with the rows of all batches, one batch after another."""
        return Batch.concat(batches)

    def on_output(self, on_output: Callable[[bytes], object]) -> None:
        """Register a function that gets the output of reward processes.

        In one process, there is no such output.
        """

    def summarise(self, records: Mapping[str, Batch], judged: ScoredRecords = NO_REWARDS) -> IterationSummary:
        """Return the summary of the columns that an iteration recorded.

        ``records``: name → batch with this column. ``judged``: which of these columns are scores or depend on
        scores.
        """
        return summarise(records, judged)

    def fetch(self, batch: Batch) -> Batch:
        """Return the batch with its values in this process."""
        return batch

    def gather(self, batch: Batch) -> Batch:
        """Return the batch with its values in this process, however large it is.

        A run records evaluations with this method.
        """
        return batch

    def moved(self) -> dict[str, Any]:
        """Return metrics of weight transfers and of moved model parts since this method was last called."""
        return self.offloads.moved()

    def traffic(self) -> dict[str, int]:
        """Return the bytes that processes sent to each other since this method was last called, by kind.

        The result is empty in one process.
        """
        return {}

    def ran(self) -> list[RankSpan]:
        """Return the spans of the calls that ranks of pools ran since this method was last called.

        The result is empty in one process.
        """
        return []

    def finished(self) -> None:
        """End the iteration and free everything that only this iteration uses. Also called after an error."""

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
        """Return follow-up prompts, and a metric with the number of prompts that were too long.

        If the batch has the column ``until``, the prompts continue responses from the places that it selects.
        Otherwise, each row's ``text`` gives one prompt. Prompts that are too long are dropped. The prompts
        have an axis of their own. ``roles``: the roles that sample from the prompts.
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
        """Return the columns ``prompt`` and ``prompt_tokens`` of follow-up prompts from each row's ``text``.

        If the rows have responses, the text follows the row's prompt and response.
        """
        return encoded_prompts(self.asking, batch, roles)

    def cut(self, batch: Batch, call_options: CallOptions = HERE) -> tuple[Batch, Tensor]:
        """Return prompts that continue responses, and how many response tokens each has, as in ``cut_rows``."""
        return cut_rows(batch)

    def choose(self, batch: Batch, options: ChooseOptions) -> tuple[Batch, PartialMetrics]:
        """Return the rows that ``options`` select by the column ``by``, without columns, and metrics.

        The metric ``dropped`` is the number of other rows.
        """
        by = self.fetch(batch)["by"]
        index = chosen_rows(by, batch.axis, options)
        return Batch(batch.axis.take(index), {}), {
            "dropped": PartialMetric.sum(float(len(batch) - len(index)))
        }

    def concat(self, parts: Sequence[Batch], call_options: CallOptions = HERE) -> Batch:
        """Return one batch with the rows of all parts, which have the same columns."""
        return joined_rows(parts)


def whole(rows: Batch, count: int, names: tuple[str, ...]) -> Batch:
    """Return the rows that a backend returned, unchanged, after checking them.

    Raises ValueError if there are not ``count`` rows, or if one of the columns ``names`` is missing.
    """
    missing = [name for name in names if name not in rows]
    if len(rows) != count or missing:
        also = f" with {listed(missing)}" if missing else ""
        raise ValueError(f"found {len(rows)} rows of {listed(rows.data)}, expected {count} rows{also}")
    return rows


def reads(names: tuple[str, ...], batch: Batch) -> Batch:
    """Return the batch with only its columns among ``names``."""
    return batch.select(*(name for name in names if name in batch))


def model_reads(batch: Batch, *optional: str) -> Batch:
    """Return the batch with only the columns that a model reads.

    These are ``prompt_tokens``, ``tokens``, and the columns ``optional`` if the batch has them.
    """
    return batch.select(*methods.MODEL_READS, *(name for name in optional if name in batch))
