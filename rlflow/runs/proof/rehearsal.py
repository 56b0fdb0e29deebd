"""A rehearsal: one iteration of the run's own plan on a few prompts, with scores that are made in place of
the reward's, in which no weights change. Each update is recorded with the rows and columns that it would have
learned from. A rehearsal ends before the first stage with side effects, which is for the run itself to
call."""

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
from rlflow.execution.account import UpdateRows
from rlflow.execution.engine import HERE, CallOptions, Engine, LocalEngine
from rlflow.execution.executor import Executor
from rlflow.execution.lanes import Lanes
from rlflow.execution.tally import PartialMetrics
from rlflow.processes.watchdog.board import Board
from rlflow.training.protocols import Sampling

# of made scores, so that means of groups differ; half of the sets reach 1 in each
POWERS, SCALES = (1 / 3, 1.0, 3.0), (1.0, 0.6)
Scoring = Callable[[str, Axis], Tensor]  # node of a reward, rows → scores [rows]


@dataclass(frozen=True)
class RecordedUpdate:
    """An update that was not made: its node's name, role, rows with the columns that it reads, loss, the
    loss's settings, number of the call, and options."""

    node: str
    role: str
    batch: Batch
    loss: Loss
    settings: Mapping[str, Any]
    call: int
    options: UpdateOptions = UpdateOptions()

    @property
    def terms(self) -> list[LossTerm]:
        """The losses of its step."""
        return terms(self.loss, self.settings, self.options.mean)


@dataclass(frozen=True)
class ScoredRows:
    """Rows that a reward was asked about, and the scores that were given in its place."""

    node: str
    batch: Batch
    scores: Tensor


@dataclass(frozen=True)
class JudgedRows:
    """The scores of the run's own reward for some rows, each [rows]: asked for once, again, and with the rows
    in another order; each row's score stands at its place in the first order."""

    node: str
    once: Tensor
    again: Tensor
    shuffled: Tensor


@dataclass
class RehearsalRecord:
    """The record of a rehearsal."""

    updates: list[RecordedUpdate] = field(default_factory=list)
    scored: list[ScoredRows] = field(default_factory=list)
    judged: list[JudgedRows] = field(default_factory=list)  # empty unless rewards were asked
    skipped: str = ""  # why its iteration had nothing to train on; empty where it had


class Rehearsing(Engine):
    """Overrides of an engine in a rehearsal. Mixed into the class of the run's own engine."""

    scoring: Scoring | None  # None: the run's own rewards give the scores
    record: RehearsalRecord
    longest: int
    fill: float
    # by node that is no trained role's forward: by how much its even rows are raised
    shift: Mapping[str, float]
    sampled: dict[tuple[int, int], tuple[Batch, Batch]]
    asks: bool  # whether the run's own rewards are asked too

    def generate(
        self, role: str, prompts: Batch, sampling: Sampling, call: int, terms: CallOptions = HERE
    ) -> Batch:
        """Sample at most ``longest`` tokens, and the same rows again for the same prompts."""
        key = (call, id(prompts.axis))
        if key not in self.sampled:
            most = min(sampling.max_tokens, self.longest)
            least = sampling.min_tokens if sampling.min_tokens <= most else 0
            # a recorded list has rows as long as it says
            short = replace(sampling, max_tokens=most, min_tokens=least, lengths=())
            self.sampled[key] = prompts, super().generate(role, prompts, short, call, terms)
        return self.sampled[key][1]

    def forward(self, role: str, want: tuple[str, ...], batch: Batch, terms: CallOptions = HERE) -> Batch:
        """The run's own forward, raised on every other row where that is asked for, and never kept for an
        update."""
        rows = super().forward(role, want, batch, replace(terms, ahead=False))
        if terms.node not in self.shift:
            return rows
        columns = {
            name: raised(data, self.shift[terms.node]) for name, data in self.gather(rows).data.items()
        }
        return self.spread(Batch(rows.axis, columns), self.near(batch, terms))

    def reward(self, role: str, batch: Batch, terms: CallOptions = HERE) -> tuple[Batch, PartialMetrics]:
        """Made scores."""
        if self.asks:
            self.record.judged.append(self.judged(role, self.gather(batch), terms))
        if self.scoring is None:
            return super().reward(role, batch, terms)
        scores = self.scoring(terms.node, batch.axis)
        own = batch.select(*(name for name in ("prompt_tokens", "tokens") if name in batch))
        self.record.scored.append(ScoredRows(terms.node, self.gather(own), scores))
        rows = Batch(batch.axis, {"scores": Data(Kind(Level.ROW, "float32"), scores)})
        return self.spread(rows, self.near(batch, terms)), {}

    def judged(self, role: str, batch: Batch, terms: CallOptions) -> JudgedRows:
        """Ask the run's own reward about the rows three times."""
        order = torch.randperm(
            len(batch), generator=torch.Generator().manual_seed(derived(0, "proof", terms.node))
        )
        asked = [
            self.gather(super(Rehearsing, self).reward(role, rows, terms)[0])["scores"]
            for rows in (batch, batch, batch.rows(order))
        ]
        return JudgedRows(terms.node, asked[0], asked[1], asked[2][order.argsort()])

    def stage(
        self, stage: Stage, batch: Batch, settings: Mapping[str, Any], call: int, terms: CallOptions = HERE
    ) -> tuple[Batch, PartialMetrics]:
        """The run's own stages, whose padding may be filled with what no result may depend on."""
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
    ) -> tuple[PartialMetrics, UpdateRows]:
        """Record the update in place of making it."""
        self.record.updates.append(
            RecordedUpdate(terms.node, role, self.gather(batch), loss, settings, call, options)
        )
        return {}, UpdateRows(
            torch.zeros(len(batch), dtype=torch.int64), loss.signature.column_names, waits=True
        )


def raised(data: Data, by: float) -> Data:
    """A token column with the entries of every other row raised, at the places that speak of tokens."""
    if data.lengths is None:
        return data
    even = (torch.arange(len(data.lengths)) % 2 == 0).to(data.value).repeat_interleave(data.lengths)
    return replace(data, value=data.value + by * even)


@dataclass
class Rehearsals:
    """Where rehearsals are held: the run's engine, threads and plan, and a few of its prompts. ``impure``:
    the stage with side effects before which they end; ``plan`` is then of what comes before it."""

    engine: Engine
    lanes: Lanes
    plan: Plan
    prompts: Batch
    fresh: Callable[[int], Batch]  # gives further prompts
    longest: int = 16
    # where nodes under way are noted, by which processes that a stage starts end with the run
    board: Board = field(default_factory=Board)

    def __post_init__(self) -> None:
        self._sampled: dict[tuple[int, int], tuple[Batch, Batch]] = {}
        self._more: dict[int, list[Batch]] = {}
        first = next((node for node in self.plan.graph.nodes if node.impure_stage), None)
        self.impure = first.impure_stage if first else None
        if first is not None:
            self.plan = self.plan.before(first.id)
        self._sound = type(self.engine) is LocalEngine  # rows on workers are gone after each iteration

    def rehearse(
        self,
        scoring: Scoring | None,
        fill: float = 0.0,
        shift: Mapping[str, float] | None = None,
        asks: bool = False,
    ) -> RehearsalRecord:
        """One iteration with these scores, or with those of the run's own rewards. ``asks``: whether these
        are asked about its rows in any case."""
        engine: Any = copy.copy(self.engine)
        engine.__class__ = type("Rehearsing" + type(engine).__name__, (Rehearsing, type(engine)), {})
        engine.record, engine.scoring, engine.longest, engine.fill = (
            RehearsalRecord(),
            scoring,
            self.longest,
            fill,
        )
        engine.sampled, engine.shift, engine.fresh = (
            self._sampled if self._sound else {},
            shift or {},
            self._prompts(),
        )
        engine.asks = asks
        executor = Executor(engine, self.lanes)
        executor.board = self.board
        try:
            executor.run(self.plan, self.prompts)
        except SkipIteration as skip:
            engine.record.skipped = str(skip)
        return engine.record  # type: ignore[no-any-return]

    def _prompts(self) -> Callable[[int], Batch]:
        """Equal further prompts in each rehearsal, for a `repeat`."""
        place = iter(range(1 << 30))

        def take(count: int) -> Batch:
            number = next(place)
            known = self._more.setdefault(count, [])
            while len(known) <= number:
                known.append(self.fresh(count))
            return known[number]

        return take


def stretched(scoring: Scoring, factor: float) -> Scoring:
    """Scores that are ``factor`` times those of ``scoring``."""
    return lambda node, axis: scoring(node, axis) * factor


def zero_or_one(node: str, axis: Axis) -> Tensor:
    """Scores of 0 and 1 in turn, as most rewards of answers give."""
    return torch.arange(len(axis)).remainder(2).float()


def uneven(seed: int, only: str | None = None, base: int = 0) -> Scoring:
    """Seeded scores from 0 to 1, no two equal within a group, or over all rows where there are no groups, in
    an order of their own and with another mean in each. ``only``: the node whose scores have this seed, while
    those of others have the seed ``base``."""

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
