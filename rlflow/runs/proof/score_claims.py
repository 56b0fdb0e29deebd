"""Claims that scores reach the gradient, in the right direction and for the right rows, checked in dry runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.compiler.graph.model import Graph
from rlflow.errors import Place
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.proof.directions import Direction, Row, keys, learned_rows, pushed
from rlflow.runs.proof.dry_run import (
    DryRunRecord,
    DryRuns,
    RecordedUpdate,
    ScoredRows,
    Scoring,
    stretched,
    uneven,
)
from rlflow.training.objective import New

SETS = 6  # sets of synthetic scores
# factors for the synthetic scores, which are from 0 to 1. Later factors are tried if the first has no effect,
# for example because a threshold is higher
FACTORS = (1.0, 100.0, -100.0)
FOLLOWS = 0.1  # minimum correlation between changes of the scores and changes of the gradient direction
# below this correlation, higher scores make rows less likely; the few rows of a dry run cannot explain it
AGAINST = -0.3
ROUNDING = 1e-4  # relative rounding error of a gradient in float32


@dataclass
class ScoreClaims:
    """Checks the claims about what a flow learns from its scores, in dry runs."""

    stage: DryRuns

    sets: int = SETS  # how many sets of scores to try

    @property
    def graph(self) -> Graph:
        """The graph of one iteration."""
        return self.stage.plan.graph

    def __post_init__(self) -> None:
        self._news: dict[tuple[str, tuple[Row, ...]], New] = {}
        self._base = self.stage.dry_run_once(uneven(0))
        # dry runs whose different scores give a different gradient
        self.rescored: list[tuple[DryRunRecord, dict[str, Direction]]] = []

    @property
    def base(self) -> DryRunRecord:
        """The record of the first dry run."""
        return self._base

    @cached_property
    def players(self) -> set[str]:
        """The names of the trained roles that sample or, if there are none, of all trained roles."""
        trained = {use.name for use in self.graph.roles if use.trained}
        return {use.name for use in self.graph.roles if use.trained and use.generates} or trained

    def place(self, node: str) -> Place | None:
        """Return the line of code that calls a node, or None if the node isn't in the graph."""
        call = self.graph.by_name.get(node)
        return call.place if call else None

    def new(self, update: RecordedUpdate) -> New:
        """Return the model's outputs for the update's rows, as computed by the run's own trainer."""
        key = (update.role, tuple(keys(update.batch)))
        if key not in self._news:
            want = tuple(update.loss.new)
            reads = update.batch.select(
                *(n for n in ("prompt_tokens", "tokens", "temperature") if n in update.batch)
            )
            rows = self.stage.queues.do(
                "model", lambda: self.stage.engine.gather(self.stage.engine.forward(update.role, want, reads))
            )
            self._news[key] = New(**{name: rows[name] for name in want})
        return self._news[key]

    def directions(self, record: DryRunRecord) -> dict[str, Direction]:
        """Return the gradient direction of each update in a dry run, by node.

        Updates without trainable rows are left out.
        """
        updates = (learned_rows(update) for update in record.updates)
        return {update.node: pushed(update, self.new(update)) for update in updates if len(update.batch)}

    def unrehearsed(self) -> Iterator[Claim]:
        """Yield an unproved claim if the dry run didn't get to every part of an iteration."""
        if (impure := self.stage.impure) is not None:
            yield Claim(
                "rehearsed",
                self.graph.name,
                "unproved",
                f"stage '{impure.name}' has side effects",
                f"{impure.place}; the dry run stops before it",
            )
        elif not self.base.updates:
            yield Claim(
                "rehearsed",
                self.graph.name,
                "unproved",
                "the dry run had no rows to train on",
                self.base.skipped,
            )

    def rewarded(self, node: str, own: dict[str, Direction]) -> tuple[list[Claim], list[Iterator[Claim]]]:
        """Check that different scores from the reward ``node`` change the gradient, towards higher scores.

        ``own``: the gradient directions in the first dry run. Returns these claims, along with iterators over
        claims that take more dry runs: if only some rows get new scores, the gradient has to change most for
        those rows.
        """
        if sum(len(rows.scores) for rows in self.base.scored if rows.node == node) < 2:
            return [
                Claim(
                    "reward-reaches",
                    node,
                    "unproved",
                    "the dry run gave this reward fewer than two rows to score",
                )
            ], []
        runs, factor, apart = self.rescaled(node, own)
        claims, further = [self.reaches(node, factor, max(apart.values(), default=0.0))], []
        for name in sorted(name for name, value in apart.items() if value > ROUNDING):
            own_runs = [(record, directions[name]) for record, directions in runs if name in directions]
            if (claim := self.direction(node, name, own_runs)) is not None:
                claims.append(claim)
                further += (
                    [self.locality(node, name, own_runs[0], factor)] if claim.verdict != "unproved" else []
                )
        return claims, further

    def rescaled(
        self, node: str, own: dict[str, Direction]
    ) -> tuple[list[tuple[DryRunRecord, dict[str, Direction]]], float, dict[str, float]]:
        """Execute dry runs with different scores from the reward ``node``, until they have an effect.

        The scores are multiplied by each of FACTORS in turn. ``own``: the gradient directions in the first
        dry run. Returns the dry runs, the factor, and the largest distance between gradient directions for
        each update. If no factor has an effect, the last one is returned.
        """
        for factor in FACTORS:
            runs = [
                (self.base, own) if factor == 1 else self.pushed_by(uneven(0), factor),
                *(self.pushed_by(uneven(seed, only=node), factor) for seed in range(1, self.sets)),
            ]
            apart = self.apart([directions for _, directions in runs])
            if max(apart.values(), default=0.0) > ROUNDING:
                self.rescored += runs
                break
        return runs, factor, apart

    def reaches(self, node: str, factor: float, most: float) -> Claim:
        """Return the claim that different scores from the reward ``node`` give different updates.

        ``factor``: what the scores were multiplied by. ``most``: the largest relative distance between
        gradient directions.
        """
        number = (
            f"{self.sets} sets of scores{_times(factor)}; gradients differ by up to {most:.3g} of their size"
        )
        if most <= ROUNDING and self.stage.impure is not None:
            why = "different scores give the same updates before that stage"
            return Claim("reward-reaches", node, "unproved", why, number)
        if most <= ROUNDING and (reason := self.waived()):
            why = f"different scores give the same update, and the loss declares why: {reason}"
            return Claim("reward-reaches", node, "unproved", why, number)
        return judged(
            "reward-reaches",
            node,
            most > ROUNDING,
            ("different scores give a different update", "different scores give the same update"),
            number,
            self.place(node),
        )

    def pushed_by(self, scoring: Scoring, factor: float) -> tuple[DryRunRecord, dict[str, Direction]]:
        """Execute a dry run with scaled scores. Return its record and gradient directions.

        The scores are those of ``scoring`` times ``factor``.
        """
        record = self.stage.dry_run_once(stretched(scoring, factor))
        return record, self.directions(record)

    def apart(self, runs: list[dict[str, Direction]]) -> dict[str, float]:
        """Return the largest distance between each update's gradient directions in the first and other dry
        runs.

        ``runs``: the gradient directions in each dry run. Only updates of `players` are included. If a dry
        run doesn't have the update, the distance is infinite.
        """
        own, others = runs[0], runs[1:]
        learning = {name: push for name, push in own.items() if self.graph.by_name[name].role in self.players}
        far = {
            name: max((push.apart(other[name]) for other in others if name in other), default=0.0)
            for name, push in learning.items()
        }
        return far | {name: float("inf") for name in learning if any(name not in other for other in others)}

    def waived(self) -> str:
        """Return the reason that a loss gives for learning without a reward (``unrewarded=``), or "" if none."""
        losses = (term.loss for one in self.base.updates for term in one.terms)
        return next((loss.unrewarded for loss in losses if loss.unrewarded), "")

    def direction(self, node: str, name: str, runs: list[tuple[DryRunRecord, Direction]]) -> Claim | None:
        """Return the claim that the update ``name`` makes rows with higher scores more likely.

        ``node``: the reward that gives the scores. ``runs``: the record and gradient direction of each dry
        run with different scores. Returns None if the update doesn't learn from the scored rows.
        """
        update = next(update for update in self.base.updates if update.node == name)
        scored = [row for row in self.base.scored if row.node == node]
        if not _about(update, scored):
            return None
        changes = [change for one in runs[1:] if (change := _change(node, runs[0], one)) is not None]
        if not changes or len({row for score, _ in changes for row in score}) < 3:
            return Claim(
                "reward-direction",
                name,
                "unproved",
                f"'{node}' scored too few different rows",
            )
        follows = _correlation(changes)
        turned = follows < AGAINST
        claim = judged(
            "reward-direction",
            name,
            follows > FOLLOWS,
            (
                f"rows with a higher score of '{node}' become more likely",
                f"rows with a higher score of '{node}' become less likely"
                if turned
                else f"the gradient of a row does not follow its score of '{node}'",
            ),
            f"correlation {follows:.3f} over {len(changes)} other sets of scores",
            self.place(name),
        )
        return replace(claim, ends_run=turned)

    def locality(
        self, node: str, name: str, base: tuple[DryRunRecord, Direction], factor: float
    ) -> Iterator[Claim]:
        """Check that giving some rows new scores changes the gradient most for those rows.

        They are the rows of one group, or two rows if there are no groups. ``base``: the record and the
        gradient direction of the update ``name`` before the change. ``factor``: what the scores are
        multiplied by.
        """
        axes = [rows.batch.axis for rows in base[0].scored if rows.node == node]
        own = {place for axis in axes for place in axis.keys[_first(axis), 0].tolist()}
        if own == {place for axis in axes for place in axis.keys[:, 0].tolist()}:
            return
        if name not in (directions := self.pushed_by(_first_reversed(node), factor)[1]):
            return
        change: dict[int, float] = {}
        before, after = (_direction_by_place(push) for push in (base[1], directions[name]))
        for row in before.keys() | after.keys():
            change[row[0]] = max(change.get(row[0], 0.0), abs(after.get(row, 0.0) - before.get(row, 0.0)))
        inside, outside = (
            max((v for p, v in change.items() if (p in own) is flag), default=0.0) for flag in (True, False)
        )
        if max(inside, outside) <= ROUNDING * float(base[1].of_rows.abs().max()):
            yield Claim(
                "reward-place",
                name,
                "unproved",
                f"reversing the order of a few scores of '{node}' does not change the gradient",
            )
            return
        yield judged(
            "reward-place",
            name,
            inside > outside * (1 + ROUNDING),
            (
                "new scores for some rows change the gradient of these rows most",
                "new scores for some rows change the gradient of other rows more",
            ),
            f"by {inside:.3g} for these rows, by {outside:.3g} for others",
            self.place(name),
        )


def _times(factor: float) -> str:
    """Return the range of the synthetic scores as text, or "" if it is 0 to 1."""
    return "" if factor == 1 else f" from 0 to {factor:g}"


def _about(update: RecordedUpdate, scored: list[ScoredRows]) -> bool:
    """Return whether an update learns from the scored rows, not just from other rows of their prompts."""
    axis = update.batch.axis
    if any(step.step != "taken" for step in axis.line):
        return any(axis.took_from(rows.batch.axis) for rows in scored)
    known = {row for rows in scored for row in keys(rows.batch)}  # joined rows do not know their origin
    return not known.isdisjoint(keys(update.batch))


RowId = tuple[tuple[int, ...], Row]  # the beginning of the row's path, and its tokens
Change = tuple[dict[RowId, float], dict[RowId, float]]


def _summed(calls: Iterable[tuple[Batch, Tensor]], width: int) -> dict[RowId, float]:
    """Add up each row's values over several calls, each given as a batch and its values [rows].

    Rows are the same if their tokens and the first ``width`` numbers of their paths are.
    """
    sums: dict[RowId, float] = {}
    for batch, values in calls:
        paths = map(tuple, batch.axis.keys[:, :width].tolist())
        for path, tokens, value in zip(paths, keys(batch), values.tolist(), strict=True):
            sums[path, tokens] = sums.get((path, tokens), 0.0) + value
    return sums


def _change(
    node: str, one: tuple[DryRunRecord, Direction], other: tuple[DryRunRecord, Direction]
) -> Change | None:
    """Return how much each row's score from ``node`` and its gradient direction change between two dry runs.

    A trained row and a scored row are the same if both their tokens and their paths are. Tokens alone aren't
    enough, because a model may sample the same response for several rows that get different scores. Returns
    None if no row was both trained on and scored in both dry runs.
    """
    scored = [
        [(rows.batch, rows.scores) for rows in record.scored if rows.node == node]
        for record, _ in (one, other)
    ]
    trained = [[(push.rows, push.of_rows)] for _, push in (one, other)]
    width = min(batch.axis.keys.shape[1] for calls in (*scored, *trained) for batch, _ in calls)
    before, after = (_summed(calls, width) for calls in scored)
    directions = [_summed(calls, width) for calls in trained]
    rows = before.keys() & after.keys()
    if not rows & (directions[0].keys() | directions[1].keys()):
        return None
    return (
        {row: after[row] - before[row] for row in rows},
        {row: directions[1].get(row, 0.0) - directions[0].get(row, 0.0) for row in rows},
    )


def _correlation(changes: list[Change]) -> float:
    """Return the correlation between changes in scores and changes in gradient directions, over all rows."""
    scores = torch.tensor([value for score, _ in changes for value in score.values()], dtype=torch.float64)
    directions = torch.tensor([push[row] for score, push in changes for row in score], dtype=torch.float64)
    return float(torch.nn.functional.cosine_similarity(scores, directions, 0))


def _direction_by_place(push: Direction) -> dict[tuple[int, ...], float]:
    """Return each row's gradient direction by its path, which starts with the row's position in the data."""
    return dict(zip(map(tuple, push.rows.axis.keys.tolist()), push.of_rows.tolist(), strict=True))


def _first(axis: Axis) -> Tensor:
    """Return a mask [rows] of the first group, or of the first two rows if groups have one row each."""
    grouped = axis.grouped and axis.groups < len(axis)
    return axis.slots == 0 if grouped else torch.arange(len(axis)) < 2


def _first_reversed(node: str) -> Scoring:
    """Return the first dry run's scoring function, but with ``node``'s scores for the first group reversed."""
    same = uneven(0)

    def scores(name: str, axis: Axis) -> Tensor:
        values = same(name, axis)
        if name == node:
            first = _first(axis)
            values[first] = values[first].flip(0)
        return values

    return scores
