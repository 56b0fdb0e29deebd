"""A dry run: one iteration of the run's own plan on a few prompts, without changing any weights.

Synthetic scores replace the rewards. Updates aren't executed but recorded, with the rows and columns they
would have learned from. A dry run stops before the first stage that has side effects.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, Data, padding
from rlflow.author.columns import Kind, Level
from rlflow.author.joint import LossTerm, terms
from rlflow.author.loss import Loss
from rlflow.author.node_options import UpdateOptions
from rlflow.author.seeds import derived
from rlflow.author.stage import Stage
from rlflow.compiler.plan import Plan
from rlflow.errors import SkipIteration
from rlflow.execution.engine import HERE, CallOptions, Engine
from rlflow.execution.executor import Executor
from rlflow.execution.local_engine import LocalEngine
from rlflow.execution.queues import Queues
from rlflow.execution.row_ledger import UpdateRows
from rlflow.execution.tally import PartialMetrics
from rlflow.processes.watchdog.heartbeat_page import HeartbeatPage
from rlflow.training.protocols import Sampling

# shapes of the synthetic scores. Groups have different means; in half of the sets of scores, each group
# reaches 1
POWERS, SCALES = (1 / 3, 1.0, 3.0), (1.0, 0.6)
Scoring = Callable[[str, Axis], Tensor]  # (node of a reward, axis of its rows) → scores [rows]


@dataclass(frozen=True)
class RecordedUpdate:
    """An update that was recorded instead of executed.

    ``batch``: the rows, with the columns that the update reads. ``settings``: the settings of the loss.
    ``call``: the number of the call within the iteration.
    """

    node: str
    role: str
    batch: Batch
    loss: Loss
    settings: Mapping[str, Any]
    call: int
    options: UpdateOptions = UpdateOptions()

    @property
    def terms(self) -> list[LossTerm]:
        """The losses that the update adds up in one optimizer step."""
        return terms(self.loss, self.settings, self.options.mean)


@dataclass(frozen=True)
class ScoredRows:
    """The rows of one reward call and their synthetic scores [rows]."""

    node: str
    batch: Batch
    scores: Tensor


@dataclass(frozen=True)
class RepeatedScores:
    """Scores [rows] from three calls of the run's own reward on the same rows.

    ``once`` and ``again`` come from two identical calls. ``shuffled`` comes from a call with the rows
    shuffled, and is put back in the order of ``once``.
    """

    node: str
    once: Tensor
    again: Tensor
    shuffled: Tensor


@dataclass
class DryRunRecord:
    """The updates and scores recorded in a dry run."""

    updates: list[RecordedUpdate] = field(default_factory=list)
    scored: list[ScoredRows] = field(default_factory=list)
    judged: list[RepeatedScores] = field(default_factory=list)  # empty unless rewards were called
    skipped: str = ""  # why the iteration was skipped; "" if it had rows to train on


class DryRunEngine(Engine):
    """The methods of an engine that work differently in a dry run.

    `DryRuns` makes a class that inherits from both this class and the run's engine.
    """

    scoring: Scoring | None  # None to use the run's own rewards
    record: DryRunRecord
    longest: int
    fill: float
    # forward of a role that is not trained, or read of a table → amount to add to its outputs for every other
    # row, or for the rows of every other key
    shift: Mapping[str, float]
    sampled: dict[tuple[int, int], tuple[Batch, Batch]]
    asks: bool  # whether the run's own rewards are called too

    def generate(
        self, role: str, prompts: Batch, sampling: Sampling, call: int, terms: CallOptions = HERE
    ) -> Batch:
        """Sample up to ``longest`` tokens per row.

        If this call has already sampled for the same prompts, the same rows are returned again.
        """
        key = (call, id(prompts.axis))
        if key not in self.sampled:
            most = min(sampling.max_tokens, self.longest)
            least = sampling.min_tokens if sampling.min_tokens <= most else 0
            # without recorded lengths, because they would make rows longer
            short = replace(sampling, max_tokens=most, min_tokens=least, lengths=())
            self.sampled[key] = prompts, super().generate(role, prompts, short, call, terms)
        return self.sampled[key][1]

    def forward(self, role: str, want: tuple[str, ...], batch: Batch, terms: CallOptions = HERE) -> Batch:
        """Run the real forward pass. Updates can't reuse its result.

        If ``shift`` has an amount for this node, it is added to the result in every other row.
        """
        return self._shifted(super().forward(role, want, batch, replace(terms, ahead=False)), terms)

    def read(self, name: str, batch: Batch, terms: CallOptions = HERE) -> Batch:
        """Read a table. If ``shift`` has an amount for this node, it is added to the numbers of every other
        key. All rows of a key get the same numbers, as from a real table.
        """
        rows = super().read(name, batch, terms)
        if terms.node not in self.shift:
            return rows
        _, keys = self.gather(batch)["key"].unique(return_inverse=True)
        return self._shifted(rows, terms, keys % 2 == 0)

    def _shifted(self, rows: Batch, terms: CallOptions, chosen: Tensor | None = None) -> Batch:
        """Add the amount of ``shift`` to the ``chosen`` rows, bool [rows], or to every other row."""
        if terms.node not in self.shift:
            return rows
        if chosen is None:
            chosen = torch.arange(len(rows)) % 2 == 0
        columns = {
            name: raised(data, self.shift[terms.node], chosen)
            for name, data in self.gather(rows).data.items()
        }
        return self.spread(Batch(rows.axis, columns), self.near(rows, terms))

    def reward(self, role: str, batch: Batch, terms: CallOptions = HERE) -> tuple[Batch, PartialMetrics]:
        """Return synthetic scores, or the scores of the run's own reward if ``scoring`` is None."""
        if self.asks:
            self.record.judged.append(self.judged(role, self.gather(batch), terms))
        if self.scoring is None:
            return super().reward(role, batch, terms)
        scores = self.scoring(terms.node, batch.axis)
        own = batch.select(*(name for name in ("prompt_tokens", "tokens") if name in batch))
        self.record.scored.append(ScoredRows(terms.node, self.gather(own), scores))
        rows = Batch(batch.axis, {"scores": Data(Kind(Level.ROW, "float32"), scores)})
        return self.spread(rows, self.near(batch, terms)), {}

    def judged(self, role: str, batch: Batch, terms: CallOptions) -> RepeatedScores:
        """Score the rows three times with the run's own reward: twice as they are, and once shuffled."""
        order = torch.randperm(
            len(batch), generator=torch.Generator().manual_seed(derived(0, "proof", terms.node))
        )
        asked = [
            self.gather(super(DryRunEngine, self).reward(role, rows, terms)[0])["scores"]
            for rows in (batch, batch, batch.rows(order))
        ]
        return RepeatedScores(terms.node, asked[0], asked[1], asked[2][order.argsort()])

    def stage(
        self, stage: Stage, batch: Batch, settings: Mapping[str, Any], call: int, terms: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """Run the real stage with ``fill`` as the padding value, which must not affect any result."""
        with padding(self.fill):
            return super().stage(stage, batch, settings, call, terms)

    def update(
        self,
        role: str,
        batch: Batch,
        loss: Loss,
        options: UpdateOptions,
        settings: Mapping[str, Any],
        call: int,
        terms: CallOptions = HERE,
        fresh: bool = False,
    ) -> tuple[PartialMetrics, UpdateRows]:
        """Add the update to ``record`` instead of executing it."""
        self.record.updates.append(
            RecordedUpdate(terms.node, role, self.gather(batch), loss, settings, call, options)
        )
        return {}, UpdateRows(
            torch.zeros(len(batch), dtype=torch.int64), loss.signature.column_names, waits=True
        )

    def follow(
        self, role: str, other: str, mix: float, stepped: bool, terms: CallOptions = HERE
    ) -> PartialMetrics:
        """Leave the weights as they are, because updates aren't executed either."""
        return {}


def raised(data: Data, by: float, chosen: Tensor) -> Data:
    """Return a token or row column of numbers with ``by`` added to the ``chosen`` rows, bool [rows]."""
    higher = chosen.to(data.value)
    if data.lengths is not None:
        higher = higher.repeat_interleave(data.lengths)
    return replace(data, value=data.value + by * higher)


@dataclass
class DryRuns:
    """Executes dry runs on a few prompts, with the run's own engine, queues and plan.

    ``impure`` is the first stage in the plan that has side effects, if any; ``plan`` then ends before this
    stage. All calls of ``plan`` are due, and ``variants`` has the plans of iterations in which only some are.
    """

    engine: Engine
    queues: Queues
    plan: Plan
    prompts: Batch
    fresh: Callable[[int], Batch]  # returns this many more prompts
    longest: int = 16
    # heartbeat page that lists the running nodes; with it, processes that a stage starts end together with
    # the run
    heartbeat_page: HeartbeatPage = field(default_factory=HeartbeatPage)

    def __post_init__(self) -> None:
        self._sampled: dict[tuple[int, int], tuple[Batch, Batch]] = {}
        self._more: dict[int, list[Batch]] = {}
        first = next((node for node in self.plan.graph.nodes if node.impure_stage), None)
        self.impure = first.impure_stage if first else None
        if first is not None:
            self.plan = self.plan.before(first.id)
        self.variants = [(due_set, plan) for due_set, plan in self.plan.each() if due_set.idle]
        self.plan = self.plan.with_all()
        # workers free their rows after each iteration, so only one process can reuse sampled rows
        self._sound = type(self.engine) is LocalEngine

    def dry_run_once(
        self,
        scoring: Scoring | None,
        fill: float = 0.0,
        shift: Mapping[str, float] | None = None,
        asks: bool = False,
        plan: Plan | None = None,
    ) -> DryRunRecord:
        """Run one iteration without training, and return what was recorded.

        ``scoring``: returns the scores for a reward call, or None to call the run's own rewards. ``asks``:
        whether to call the run's own rewards as well and record their scores. ``fill``: the padding value for
        stages. ``shift``: for forwards of roles that aren't trained and reads of tables, an amount to add to
        their outputs in every other row, or for every other key. ``plan``: the plan of other iterations, one
        of ``variants``.
        """
        engine: Any = copy.copy(self.engine)
        engine.__class__ = type("Rehearsing" + type(engine).__name__, (DryRunEngine, type(engine)), {})
        engine.record, engine.scoring, engine.longest, engine.fill = (
            DryRunRecord(),
            scoring,
            self.longest,
            fill,
        )
        engine.sampled, engine.shift = self._sampled if self._sound else {}, shift or {}
        engine.fresh, engine.draws = self._prompts(), None
        engine.asks = asks
        executor = Executor(engine, self.queues)
        executor.heartbeat_page = self.heartbeat_page
        try:
            executor.run(plan or self.plan, self.prompts)
        except SkipIteration as skip:
            engine.record.skipped = str(skip)
        return engine.record  # type: ignore[no-any-return]

    def _prompts(self) -> Callable[[int], Batch]:
        """Return a function that gives a `repeat` more prompts, the same ones in each dry run."""
        place = iter(range(1 << 30))

        def take(count: int) -> Batch:
            number = next(place)
            known = self._more.setdefault(count, [])
            while len(known) <= number:
                known.append(self.fresh(count))
            return known[number]

        return take


def stretched(scoring: Scoring, factor: float) -> Scoring:
    """Scale a scoring function: its scores are multiplied by ``factor``."""
    return lambda node, axis: scoring(node, axis) * factor


def zero_or_one(node: str, axis: Axis) -> Tensor:
    """Return alternating scores of 0 and 1, float32 [rows]. Most rewards for answers use only these values."""
    return torch.arange(len(axis)).remainder(2).float()


def uneven(seed: int, only: str | None = None, base: int = 0) -> Scoring:
    """Return a scoring function that gives seeded random scores from 0 to 1.

    Within a group, all scores differ, and each group has an order and mean of its own. Rows without groups
    count as one group. ``only``: the one node whose scores use ``seed``, while all others use the seed
    ``base``. If it is None, all nodes use ``seed``.
    """

    def scores(node: str, axis: Axis) -> Tensor:
        own = seed if only in (None, node) else base
        chance = torch.Generator().manual_seed(derived(own, "proof", node))
        groups = (
            axis.slots
            if axis.grouped and axis.groups < len(axis)
            else torch.zeros(len(axis), dtype=torch.int64)
        )
        values = torch.zeros(len(axis))
        for group in range(int(groups.max()) + 1 if len(axis) else 0):
            rows = (groups == group).nonzero()[:, 0]
            power, scale = (int(torch.randint(count, (), generator=chance)) for count in (3, 2))
            steps = torch.linspace(0, 1, len(rows)) ** POWERS[power] * SCALES[scale * (own % 2)]
            values[rows] = steps[torch.randperm(len(rows), generator=chance)]
        return values

    return scores
