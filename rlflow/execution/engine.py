"""The engine: models, rewards and RNG of a run, with one method per kind of call.

Eager flows and compiled plans call the same engine, so their results are the same.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from rlflow.author import methods
from rlflow.author.axis import Axis, FollowUpTokens
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import CLOCK, Kind, Level
from rlflow.author.figures import Figure, Of
from rlflow.author.loss import Loss
from rlflow.author.messages import Message, as_text
from rlflow.author.node_options import ChooseOptions, UpdateOptions
from rlflow.author.seeds import derived, row_seeds
from rlflow.author.stage import Stage
from rlflow.compiler.residency_schedule import computing, learning, sampling, syncing
from rlflow.compiler.spans import RankSpan
from rlflow.errors import SkipIteration, listed
from rlflow.execution import episodes
from rlflow.execution.account import REPLACED, Count, End, RowAccount, RowOutcome, UpdateRows
from rlflow.execution.apply import apply_stage
from rlflow.execution.lineage import chosen_rows, cut_rows, joined_rows, whole_completions
from rlflow.execution.offload_manager import OffloadManager
from rlflow.execution.row_figures import NO_REWARDS, ScoredRecords
from rlflow.execution.summary import IterationSummary, summarise
from rlflow.execution.tally import Label, PartialMetric, PartialMetrics, known
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.training.chunks import chunked
from rlflow.training.loss_rows import WITH_GROUP, broken_columns, group_of, mask_counts, with_groups
from rlflow.training.protocols import (
    ForwardsAhead,
    Generator,
    GivesChunks,
    Sampling,
    ScoresTokens,
    Trainer,
    as_long,
)

Metrics = dict[Figure, float]


@dataclass
class Model:
    """A role's weights: the trainer, the generator, and the version of each.

    The trainer owns the weights, and the generator samples from a copy or from the same tensors. A version is
    the number of updates that the weights have had.
    """

    trainer: Trainer | None = None
    generator: Generator | None = None
    version: int = 0
    sampled_version: int = 0

    @property
    def stale(self) -> bool:
        """Whether the trainer's weights are newer than the weights that the generator samples with."""
        return (
            self.generator is not None and self.trainer is not None and self.sampled_version != self.version
        )

    def synchronise(self) -> None:
        """Send the trainer's weights to the generator if they are newer."""
        if self.generator is not None and self.trainer is not None and self.stale:
            self.generator.receive(self.trainer.weights(), self.version)
            self.sampled_version = self.version


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


Roles = tuple[str, ...]
Asked = str | list[Message]  # text or messages of a follow-up prompt


def as_bytes(roles: Roles, texts: Sequence[Asked]) -> list[list[int]]:
    """Return the UTF-8 bytes of texts as token ids, for runs without a model."""
    return [list(as_text(text).encode()) for text in texts]


def bytes_after(roles: Roles, texts: Sequence[Asked], sampled: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the UTF-8 bytes of texts as token ids. The sampled ids before the texts have no effect."""
    return as_bytes(roles, texts)


def text_of_bytes(roles: Roles, rows: Sequence[Sequence[int]], bare: bool = False) -> list[str]:
    """Return the texts of token ids that ``as_bytes`` returned."""
    return [bytes(number % 256 for number in row).decode(errors="replace") for row in rows]


@dataclass(frozen=True)
class Asking:
    """The functions that encode follow-up prompts and decode tokens, for the models of some roles."""

    encode: Callable[[Roles, Sequence[Asked]], list[list[int]]] = as_bytes  # token ids of texts
    # token ids of a next user turn after sampled ids
    follow: Callable[[Roles, Sequence[Asked], Sequence[Sequence[int]]], list[list[int]]] = bytes_after
    # token ids of an environment message after sampled ids; a plain text is appended unchanged
    speak: Callable[[Roles, Sequence[Asked], Sequence[Sequence[int]]], list[list[int]]] = bytes_after
    # (roles, token ids, bare): texts; ``bare`` drops special tokens
    decode: Callable[..., list[str]] = text_of_bytes
    # tool calls in token ids, as ``rlflow.author.messages.ToolCall``
    calls: Callable[[Roles, Sequence[Sequence[int]]], list[list[Any]]] = lambda roles, rows: [
        [] for _ in rows
    ]
    longest: float = math.inf  # maximum tokens of a follow-up prompt


class KeepsState(Protocol):
    """The part of a trainer that a run saves and restores, in this process or on a pool.

    See ``rlflow.training.protocols.Trainer``.
    """

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that a bit-equal continuation needs, as a copy or as live tensors."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a state that ``state`` returned."""

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""


class RoleModel(Protocol):
    """A role's model as a run sees it, in this process or on pools."""

    version: int  # updates in the trainer's weights
    sampled_version: int  # updates in the generator's weights

    @property
    def trainer(self) -> KeepsState | None:
        """The trainer, which owns the weights; None if the run does not train or compute with this model."""

    @property
    def generator(self) -> Any:
        """The generator, which samples from the weights, or its pool; None if the run does not need one."""


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
        sampled = batch.data["tokens"].lists() if "tokens" in batch else None
        texts = batch["text"]
        ids = (
            self.asking.encode(roles, texts) if sampled is None else self.asking.follow(roles, texts, sampled)
        )
        if sampled is not None:
            before = zip(batch.data["prompt_tokens"].lists(), sampled, strict=True)
            ids = [[*prompt, *response, *more] for (prompt, response), more in zip(before, ids, strict=True)]
        flat = torch.tensor([token for row in ids for token in row], dtype=torch.int64)
        lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
        tokens = Data(Kind(Level.PROMPT, "int64"), flat, lengths)
        prompt = replace(batch.data["text"], value=tuple(map(as_text, texts)))
        return Batch(batch.axis, {"prompt": prompt, "prompt_tokens": tokens})

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

    def repeat(
        self,
        body: Callable[[Batch], Batch],
        prompts: Batch,
        groups: int,
        tries: int,
        account: RowAccount,
        names: RepeatNames,
    ) -> tuple[Batch, PartialMetrics]:
        """Return up to ``groups`` groups that ``body`` keeps, in prompt order, and metrics.

        ``tries``: maximum number of calls of ``body``, each with fresh prompts. ``names``: names for the
        account. Raises SkipIteration if no group is kept.
        """
        fresh = (self.fresh(len(prompts)) for _ in range(tries - 1))
        batches, tried = self.kept_groups(body, itertools.chain([prompts], fresh), groups, account, names)
        joined = self.joined(batches)
        wanted = joined.axis.slots < groups
        for source, count in self.counts(joined, names, ~wanted):
            account.end(source, End(RowOutcome.SURPLUS, names.node, setting=f"groups={groups}"), count)
        return joined.rows(wanted), repeat_metrics(account, names, tried, groups)

    def kept_groups(
        self,
        body: Callable[[Batch], Batch],
        draws: Iterator[Batch],
        groups: int,
        account: RowAccount,
        names: RepeatNames,
        opening: Sequence[Batch] = (),
    ) -> tuple[list[Batch], int]:
        """Call ``body`` on batches of prompts until it has kept ``groups`` groups, or no batch is left.

        Returns batches of complete groups in prompt order, and the number of batches of prompts that were
        used. The groups in ``opening`` come first. The last call of ``body`` may give more groups than
        needed. Raises SkipIteration if there is no group.
        """
        batches, count, tried = list(opening), sum(batch.axis.groups for batch in opening), 0
        while count < groups and (prompts := next(draws, None)) is not None:
            rows = body(prompts)
            keep = (
                self.fetch(rows.select("keep"))["keep"].bool()
                if "keep" in rows
                else torch.ones(len(rows), dtype=torch.bool)
            )
            tried += 1
            for source, number in self.counts(rows, names):
                (account.sample if source == names.source else account.place)(source, number)
            for source, number in self.counts(rows, names, ~keep):
                account.end(source, End(RowOutcome.LEFT_OUT, names.node, "not kept"), number)
            batches.append(rows.rows(keep))
            count += batches[-1].axis.groups
        if count == 0:
            raise SkipIteration(f"the body kept none of {seen(account, names)} groups in {tried} tries")
        return [batch for batch in batches if len(batch)], tried

    def counts(
        self, rows: Batch, names: RepeatNames, where: Tensor | None = None
    ) -> Iterator[tuple[str, Count]]:
        """Yield counts of rows that a `repeat` body returned, by the node that sampled them.

        Rows that a stage in the body put in place of sampled rows are counted under that stage. ``where``:
        rows to count, bool [rows].
        """
        lengths = rows.data["tokens"].lengths if "tokens" in rows else None
        if REPLACED not in rows:
            yield names.source, Count.of(rows.axis, lengths, where)
            return
        replaced = self.gather(rows.select(REPLACED))[REPLACED]
        own, others = (each if where is None else each & where for each in (~replaced, replaced))
        yield names.source, Count.of(rows.axis, lengths, own)
        if bool(others.any()):
            yield names.placer, Count.of(rows.axis, lengths, others, own)


@dataclass
class LocalEngine(Engine):
    """Runs the calls of a run in one process."""

    models: Mapping[str, Model]  # by role

    def sample(
        self, role: str, prompts: Batch, sampling: Sampling, seed: int, call_options: CallOptions = HERE
    ) -> Batch:
        """Sample rows from prompts with the newest weights. Equal seeds give equal rows."""
        model = self._synchronised(role)
        assert model.generator is not None
        seeds = row_seeds(seed, prompts.axis.repeat(sampling.samples).keys)
        if role in self.environments:
            rows = self._episodes(role, sampling).sampled(prompts, seeds, seed)
        else:
            rows = as_long(
                model.generator.generate(prompts.select("prompt_tokens"), sampling, seeds), sampling
            )
        rows = self._with_beginnings(role, prompts, rows, sampling.skip_special_tokens)
        return whole(rows, len(prompts) * sampling.samples, self.sampled_columns(role))

    def _episodes(self, role: str, sampling: Sampling) -> episodes.Episodes:
        generator, ask = self.models[role].generator, self.asking
        assert generator is not None
        speak, decode = (
            partial(ask.speak, (role,)),
            partial(ask.decode, (role,), bare=sampling.skip_special_tokens),
        )
        speech = episodes.Speech(
            speak, lambda text: speak([text], [[]])[0], decode, partial(ask.calls, (role,))
        )
        return episodes.Episodes(generator.generate, self.environments[role], sampling, speech)

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
        # with an environment all rows take each turn together, so all rows end at the same time
        if role in self.environments:
            rows = self.sample(role, prompts, sampling, seed, call_options)
            lengths = rows.data["tokens"].row_lengths
            for index in chunked([lengths.argsort(stable=True)], len(rows), into.count):
                yield rows.rows(index).select(*into.names)
            yield rows
            return
        generator = self._synchronised(role).generator
        assert isinstance(generator, GivesChunks)
        seeds = row_seeds(seed, prompts.axis.repeat(sampling.samples).keys)
        pieces: list[Batch] = []
        for chunk in generator.generate_chunks(prompts.select("prompt_tokens"), sampling, seeds, into.count):
            pieces.append(
                self._with_beginnings(role, prompts, as_long(chunk, sampling), sampling.skip_special_tokens)
            )
            yield pieces[-1].select(*into.names)
        if len(pieces) != into.count:
            raise ValueError(f"found {len(pieces)} chunks of sampled rows, expected {into.count}")
        rows = self.in_order(pieces)
        yield whole(rows, len(prompts) * sampling.samples, (*methods.GENERATE_GIVES, "group"))

    def _with_beginnings(self, role: str, prompts: Batch, rows: Batch, bare: bool) -> Batch:
        """Add to each completion the part of the response that its prompt already contains."""
        if "prefix_length" not in prompts:
            return rows
        return whole_completions(partial(self.asking.decode, (role,), bare=bare), prompts, rows)

    def forward(
        self, role: str, want: tuple[str, ...], batch: Batch, call_options: CallOptions = HERE
    ) -> Batch:
        """Run a role's trainer forward over rows, and return the wanted columns.

        ``want``: the quantities to return, such as logprobs.
        """
        trainer = self.models[role].trainer
        assert trainer is not None
        self.offloads.settle(computing(role))
        forward = (
            trainer.forward_ahead
            if call_options.ahead and isinstance(trainer, ForwardsAhead)
            else trainer.forward
        )
        return Batch(batch.axis, whole(forward(batch, want), len(batch), want).data)

    def score(self, role: str, batch: Batch, call_options: CallOptions = HERE) -> Batch:
        """Return the column `logprobs` of given tokens from the role's generator.

        The generator first gets the trainer's newest weights.
        """
        generator = self._synchronised(role).generator
        assert isinstance(generator, ScoresTokens)
        rows = generator.logprobs(batch)
        return Batch(batch.axis, whole(rows, len(batch), ("logprobs",)).data)

    def reward(
        self, role: str, batch: Batch, call_options: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """Score rows. Return the column ``scores``, and metrics with the number of missing scores.

        A row whose episode failed is not passed to the reward and has a missing score.
        """
        causes = batch["failed"] if "failed" in batch else ()  # noqa: SIM401 - a batch has no get
        sound = [row for row, cause in enumerate(causes) if not cause] if any(causes) else None
        judged = batch if sound is None else batch.rows(sound)
        scores, metrics = self.scorers[role](judged) if len(judged) or sound is None else (torch.zeros(0), {})
        if tuple(scores.shape) != (len(judged),):
            raise ValueError(
                f"found scores of shape {list(scores.shape)}, expected [{len(judged)}], one per row"
            )
        scores = scores if scores.dtype is torch.float64 else scores.float()
        if sound is not None:
            scores = torch.full((len(batch),), torch.nan, dtype=scores.dtype).index_copy(
                0, torch.tensor(sound, dtype=torch.int64), scores
            )
            counts = Counter(cause for cause in causes if cause)
            metrics = {
                **metrics,
                **{Figure(Of.MISSING, cause): PartialMetric.sum(count) for cause, count in counts.items()},
            }
        data = Data(Kind(Level.ROW, str(scores.dtype).removeprefix("torch.")), scores)
        metrics = {
            "mean": PartialMetric.of(scores),
            **metrics,
            "missing": PartialMetric.sum(float(scores.isnan().sum())),
        }
        return Batch(batch.axis, {"scores": data}), metrics

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
        """Train the role in this process."""
        model = self.models[role]
        assert model.trainer is not None
        self.offloads.settle(learning(role))
        broken = broken_columns(batch, loss)
        broken = with_groups(broken, group_of(batch), WITH_GROUP) if loss.rows == "group" else broken
        metrics = model.trainer.update(
            batch,
            loss,
            epochs=options.epochs,
            minibatch=options.minibatch,
            mean=options.mean,
            seed=self.seed_of(call),
            **settings,
        )
        model.version += 1
        names, stepped = loss.signature.column_names, metrics.get("steps", 1) > 0
        return known(metrics), UpdateRows(broken, names, stepped=stepped, tokens=mask_counts(batch))

    def stage(
        self,
        stage: Stage,
        batch: Batch,
        settings: Mapping[str, Any],
        call: int,
        call_options: CallOptions = HERE,
    ) -> tuple[Batch, PartialMetrics]:
        """Run a stage on rows. Returns its columns and its partial metrics."""
        self.may_change(stage)
        trainer = self.models[stage.on].trainer if stage.on else None
        if stage.on:
            self.offloads.settle(learning(stage.on))
        return apply_stage(stage, batch, settings, self.seed_of(call), trainer)

    def _synchronised(self, role: str) -> Model:
        """Return the role's model, ready to sample with the newest weights."""
        model = self.models[role]
        if model.stale:
            self.offloads.settle(syncing(role))
            model.synchronise()
        self.offloads.settle(sampling(role))
        return model


class RepeatNames(NamedTuple):
    """Names under which an account counts the rows of a `repeat`."""

    node: str  # the `repeat` itself
    source: str  # the node in its body that samples
    placer: str = ""  # the stage in its body that returns the body's tokens


def seen(account: RowAccount, names: RepeatNames) -> int:
    """Return the number of groups that a `repeat` body returned, kept or not.

    A group counts as sampled even if a stage replaced all its rows.
    """
    return account.sampled.get(names.source, Count()).groups


def repeat_metrics(
    account: RowAccount, names: RepeatNames, tried: int, groups: int
) -> dict[Label, PartialMetric]:
    """Compute the metrics of a `repeat` from the account.

    Kept groups beyond ``groups`` are counted as ``surplus``. They are dropped, or carried over to a later
    iteration.
    """
    node, own, sampled = names.node, (names.source, names.placer), seen(account, names)
    dropped = sum(
        count.groups
        for (name, end), count in account.ends.items()
        if name in own and end.fate in (RowOutcome.LEFT_OUT, RowOutcome.READ) and end.node != names.placer
    )
    beyond = account.of(RowOutcome.SURPLUS, node).groups + account.of(RowOutcome.CARRIED, node).groups
    opened = (
        sum(account.opened.get(name, Count()).groups for name in own)
        - account.of(RowOutcome.STALE, node).groups
    )
    groups_kept = sampled + opened - dropped - beyond
    return known(
        {"tries": float(tried), "kept": float(groups_kept), "seen": float(sampled), "surplus": float(beyond)}
    )


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
