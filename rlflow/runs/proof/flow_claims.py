"""Claims about a flow, checked in dry runs.

The claims are that scores reach the gradient, in the right direction and at the right rows, and that every
input of a loss has an effect. Checking them needs forward passes of the models and changes no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch, padding
from rlflow.compiler.check.influence import moved
from rlflow.compiler.graph.model import Graph, Op
from rlflow.errors import Place, listed
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.proof.directions import Direction, Row, keys, learned_rows, objective, pushed
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
FAR = 0.01  # relative difference of gradients above which optimizer steps must differ
LARGE_STEP = 1.0  # nats to move log-probs by, to test a loss far from the sampling policy


@dataclass
class FlowClaims:
    """Checks the claims about a flow in dry runs."""

    stage: DryRuns
    sets: int = SETS  # sets of scores to try

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
        """The names of the trained roles that sample; if no trained role samples, the names of all trained
        roles."""
        trained = {use.name for use in self.graph.roles if use.trained}
        return {use.name for use in self.graph.roles if use.trained and use.generates} or trained

    def place(self, node: str) -> Place | None:
        """Return the line of code that calls a node; None if the graph does not have the node."""
        call = self.graph.by_name.get(node)
        return call.place if call else None

    def new(self, update: RecordedUpdate) -> New:
        """Return the outputs of the role's model for the rows of an update, computed by the run's own
        trainer."""
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
        """Return the gradient direction of each update of a dry run, as node → direction.

        Updates without trainable rows are omitted.
        """
        updates = (learned_rows(update) for update in record.updates)
        return {update.node: pushed(update, self.new(update)) for update in updates if len(update.batch)}

    def claims(self) -> Iterator[Claim]:
        """Yield all claims, most important first."""
        for group in self.groups():
            yield from group

    def groups(self) -> Iterator[list[Claim]]:
        """Yield all claims in groups, most important first.

        The first group has the claims about rewards, which decide whether a run may start. Each later group
        needs more dry runs.
        """
        begins = list(self.unrehearsed())
        own = self.directions(self.base)
        rewarded = (
            [self.rewarded(node, own) for node in dict.fromkeys(scored.node for scored in self.base.scored)]
            if own
            else []
        )
        yield [*begins, *(claim for claims, _ in rewarded for claim in claims)]
        for locality in (locality for _, further in rewarded for locality in further):
            yield list(locality)
        for update in map(learned_rows, self.base.updates):
            yield list(self.of_update(*self.telling(update, own)))

    def unrehearsed(self) -> Iterator[Claim]:
        """Yield an unproved claim if the dry run did not reach all parts of an iteration."""
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

    # -- rewards
    # --------------------------------------------------------------------------------------------------------

    def rewarded(self, node: str, own: dict[str, Direction]) -> tuple[list[Claim], list[Iterator[Claim]]]:
        """Check that different scores of the reward ``node`` give different gradients, towards higher scores.

        ``own``: the gradient directions of the first dry run. Returns these claims, and iterators over claims
        that need further dry runs: if some rows get new scores, the gradient must change most at these rows.
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
        most = 0.0
        for factor in FACTORS:
            runs = [
                (self.base, own) if factor == 1 else self.pushed_by(uneven(0), factor),
                *(self.pushed_by(uneven(seed, only=node), factor) for seed in range(1, self.sets)),
            ]
            apart = self.apart([directions for _, directions in runs])
            if (most := max(apart.values(), default=0.0)) > ROUNDING:
                self.rescored += runs
                break
        number = (
            f"{self.sets} sets of scores{_times(factor)}; gradients differ by up to {most:.3g} of their size"
        )
        if most <= ROUNDING and self.stage.impure is not None:
            return [
                Claim(
                    "reward-reaches",
                    node,
                    "unproved",
                    "different scores give the same updates before that stage",
                    number,
                )
            ], []
        if most <= ROUNDING and (reason := self.waived()):
            why = f"different scores give the same update, and the loss declares why: {reason}"
            return [Claim("reward-reaches", node, "unproved", why, number)], []
        claims, further = (
            [
                judged(
                    "reward-reaches",
                    node,
                    most > ROUNDING,
                    ("different scores give a different update", "different scores give the same update"),
                    number,
                    self.place(node),
                )
            ],
            [],
        )
        for name in sorted(name for name, value in apart.items() if value > ROUNDING):
            own_runs = [(record, directions[name]) for record, directions in runs if name in directions]
            if (claim := self.direction(node, name, own_runs)) is not None:
                claims.append(claim)
                further += (
                    [self.locality(node, name, own_runs[0], factor)] if claim.verdict != "unproved" else []
                )
        return claims, further

    def pushed_by(self, scoring: Scoring, factor: float) -> tuple[DryRunRecord, dict[str, Direction]]:
        """Execute a dry run with the scores of ``scoring`` times ``factor``. Return its record and its
        gradient directions."""
        record = self.stage.dry_run_once(stretched(scoring, factor))
        return record, self.directions(record)

    def apart(self, runs: list[dict[str, Direction]]) -> dict[str, float]:
        """Return, for each update, the largest distance between its gradient directions in the first and any
        other dry run.

        ``runs``: the gradient directions of each dry run. Only updates of `players` are included. The
        distance is infinite if a dry run does not have the update.
        """
        own, others = runs[0], runs[1:]
        learning = {name: push for name, push in own.items() if self.graph.by_name[name].role in self.players}
        far = {
            name: max((push.apart(other[name]) for other in others if name in other), default=0.0)
            for name, push in learning.items()
        }
        return far | {name: float("inf") for name in learning if any(name not in other for other in others)}

    def waived(self) -> str:
        """Return the reason that a loss declares for learning without a reward (``unrewarded=``); "" if there
        is none."""
        losses = (term.loss for one in self.base.updates for term in one.terms)
        return next((loss.unrewarded for loss in losses if loss.unrewarded), "")

    def direction(self, node: str, name: str, runs: list[tuple[DryRunRecord, Direction]]) -> Claim | None:
        """Return the claim that the update ``name`` makes rows with higher scores of the reward ``node`` more
        likely.

        ``runs``: the record and the gradient direction of dry runs with different scores. Returns None if the
        update does not learn from the scored rows.
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
        """Check that new scores for some rows change the gradient of these rows most.

        The new scores are for the rows of one group, or for two rows if there are no groups. ``base``: the
        record and the gradient direction of the update ``name`` before the change. ``factor``: multiplies the
        scores.
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

    # -- losses
    # --------------------------------------------------------------------------------------------------------

    def telling(
        self, update: RecordedUpdate, own: dict[str, Direction]
    ) -> tuple[RecordedUpdate, Direction | None]:
        """Return the update and its gradient direction, from a dry run whose scores give a gradient.

        If the first dry run gives no gradient, larger synthetic scores are tried. If no scores give a
        gradient, the result is from the first dry run. ``own``: the gradient directions of the first dry run.
        """
        push = own.get(update.node)
        if push is None or bool(push.main.any()) or not self.base.scored:
            return update, push
        for factor in FACTORS[1:]:
            record, directions = self.pushed_by(uneven(0), factor)
            if (other := directions.get(update.node)) is not None and bool(other.main.any()):
                return next(learned_rows(one) for one in record.updates if one.node == update.node), other
        return update, push

    def furthest(self, node: str, push: Direction | None) -> RecordedUpdate | None:
        """Return the update from the dry run with other scores whose gradient differs most from ``push``.

        Returns None if no gradient differs much.
        """
        apart = [
            (push.apart(directions[node]), record)
            for record, directions in self.rescored
            if push is not None and node in directions
        ]
        most, record = max(apart, key=lambda one: one[0], default=(0.0, None))
        if record is None or most <= FAR:
            return None
        return next(learned_rows(one) for one in record.updates if one.node == node)

    def of_update(self, update: RecordedUpdate, push: Direction | None) -> Iterator[Claim]:
        """Check the claims about one update that do not depend on the scores of its rows.

        ``push``: the gradient direction of the update, or None if it has no trainable rows.
        """
        if push is None:
            yield Claim("rehearsed", update.node, "unproved", "the dry run produced no trainable rows")
            return
        tried = [
            float(push.main.abs().max()),
            *(float(pushed(update, new).main.abs().max()) for new in self.far(update)),
        ]
        yield judged(
            "gradient",
            update.node,
            max(tried) > 0,
            ("the loss has a gradient", "the gradient of the loss is zero"),
            f"largest entry {max(tried):.3g}",
            update.loss.place,
        )
        yield from self.columns(update)
        yield from self.signs(update, push)
        yield from self.beyond(update, push)

    def far(self, update: RecordedUpdate) -> list[New]:
        """Return two sets of model outputs for an update's rows: after a large, uneven step up, and after one
        down."""
        new = self.new(update)
        return [
            New(**{name: None if x is None else _step(name, x, sign) for name, x in vars(new).items()})
            for sign in (1, -1)
        ]

    def columns(self, update: RecordedUpdate) -> Iterator[Claim]:
        """Check that each column that a loss reads has an effect on the gradient or the value of the loss."""
        news, batch = [self.new(update), *self.far(update)], update.batch
        silent, shown = [], []
        for term in update.terms:
            for name in term.loss.signature.column_names:
                if (
                    name not in batch
                    or name in ("mask", "group")
                    or not isinstance(value := batch[name], Tensor)
                    or not value.dim()
                ):
                    continue
                shown.append(name)
                if not any(_differ(update, new, {name: other}) for new in news for other in moved(value)):
                    silent.append(name)
        if not shown:
            return
        yield judged(
            "columns",
            update.node,
            not silent,
            (
                f"every column that the loss reads has an effect: {listed(dict.fromkeys(shown))}",
                (
                    f"loss '{update.loss.name}' reads {listed(dict.fromkeys(silent))}, without an effect on its "
                    "gradient or metrics"
                ),
            ),
            f"{len(news)} policies, 3 sizes, both signs",
            update.loss.place,
        )

    def signs(self, update: RecordedUpdate, push: Direction) -> Iterator[Claim]:
        """Check the claims about the gradient direction of an update that need no reward.

        Values must move towards returns. Chosen responses must become more likely than rejected responses.
        Responses from the data must become more likely.
        """
        batch, mask = update.batch, update.batch["mask"]
        if "values" in push.by and "returns" in batch:
            error = torch.where(mask, batch["returns"] - self.new(update).values, 0.0).double().flatten()
            toward = float(
                torch.nn.functional.cosine_similarity(push.by["values"].double().flatten(), error, 0)
            )
            yield judged(
                "values-direction",
                update.node,
                toward > FOLLOWS,
                (
                    "the gradient moves values towards the returns",
                    "the gradient does not move values towards the returns",
                ),
                f"correlation {toward:.3f}",
                update.loss.place,
            )
        if update.loss.rows == "group" and self.given(update):  # pairs, with the chosen response first
            rows = push.main.double().sum(1) if push.main.dim() == 2 else push.main.double()
            chosen = batch["chosen"].bool() if "chosen" in batch else torch.arange(len(batch)) % 2 == 0
            over = float(rows[chosen].mean() - rows[~chosen].mean())
            yield judged(
                "chosen-direction",
                update.node,
                over > 0,
                (
                    "the gradient raises chosen responses more than rejected ones",
                    "the gradient does not raise chosen responses more than rejected ones",
                ),
                f"difference {over:.3g}",
                update.loss.place,
            )
        elif not self.base.scored and update.loss.new[0] == "logprobs" and self.given(update):
            total = float(push.main.double().sum())
            yield judged(
                "given-direction",
                update.node,
                total > 0,
                (
                    "the gradient makes the responses in the data more likely",
                    "the gradient does not make the responses in the data more likely",
                ),
                f"sum {total:.3g}",
                update.loss.place,
            )

    def given(self, update: RecordedUpdate) -> bool:
        """Return whether the rows of an update are responses from the data."""
        node = self.graph.by_name[update.node]
        return any(
            item.parameter == "tokens" and self.graph.nodes[item.column.node].op is Op.DATA
            for item in node.inputs
        )

    def beyond(self, update: RecordedUpdate, push: Direction) -> Iterator[Claim]:
        """Check that padding, and values at masked-out tokens, do not change the gradient."""
        with padding(float("nan")):
            filled = pushed(update, self.new(update))
        same = push.apart(filled)
        yield judged(
            "padding",
            update.node,
            same <= ROUNDING,
            ("values in the padding do not change the gradient", "values in the padding change the gradient"),
            f"gradients differ by {same:.3g}",
            update.loss.place,
        )
        mask = _with_holes(update.batch["mask"])
        if torch.equal(mask, update.batch["mask"]):
            yield Claim("holes", update.node, "unproved", "no row is long enough to mask out a token in it")
            return
        columns = {
            name: torch.where(mask, value, value + 7.0)
            for name in update.loss.signature.column_names
            if name in update.batch
            and isinstance(value := update.batch[name], Tensor)
            and value.shape == mask.shape
            and value.is_floating_point()
        }
        one, other = (
            pushed(update, self.new(update), {"mask": mask}),
            pushed(update, self.new(update), {**columns, "mask": mask}),
        )
        apart = one.apart(other)
        yield judged(
            "holes",
            update.node,
            apart <= ROUNDING,
            (
                "values at masked-out tokens do not change the gradient",
                "values at masked-out tokens change the gradient",
            ),
            f"gradients differ by {apart:.3g}",
            update.loss.place,
        )


def _times(factor: float) -> str:
    """Return the range of the synthetic scores as text; "" if the range is 0 to 1."""
    return "" if factor == 1 else f" from 0 to {factor:g}"


def _about(update: RecordedUpdate, scored: list[ScoredRows]) -> bool:
    """Return whether an update learns from the scored rows themselves, and not only from other rows of their
    prompts."""
    axis = update.batch.axis
    if any(step.step != "taken" for step in axis.line):
        return any(axis.took_from(rows.batch.axis) for rows in scored)
    known = {row for rows in scored for row in keys(rows.batch)}  # joined rows do not know their origin
    return not known.isdisjoint(keys(update.batch))


RowId = tuple[tuple[int, ...], Row]  # the beginning of the row's path, and its tokens
Change = tuple[dict[RowId, float], dict[RowId, float]]


def _summed(calls: Iterable[tuple[Batch, Tensor]], width: int) -> dict[RowId, float]:
    """Return the sum of the values of each row over several calls, each a batch and its values [rows].

    Rows are the same if their tokens and the first ``width`` numbers of their paths are equal.
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
    """Return how the scores of ``node`` and the gradient directions change between two dry runs, by row.

    A trained row and a scored row are the same row if they have the same tokens and the same path. Tokens
    alone are not enough, because a model may sample equal responses for several rows that get different
    scores. Returns None if no row was both trained on and scored in both dry runs.
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
    """Return the correlation between changes of scores and changes of gradient directions, over all rows and
    changes."""
    scores = torch.tensor([value for score, _ in changes for value in score.values()], dtype=torch.float64)
    directions = torch.tensor([push[row] for score, push in changes for row in score], dtype=torch.float64)
    return float(torch.nn.functional.cosine_similarity(scores, directions, 0))


def _direction_by_place(push: Direction) -> dict[tuple[int, ...], float]:
    """Return row path → gradient direction of the row. The path begins with the row's position in the
    data."""
    return dict(zip(map(tuple, push.rows.axis.keys.tolist()), push.of_rows.tolist(), strict=True))


def _first(axis: Axis) -> Tensor:
    """Return bool [rows]: True for the rows of the first group, or for the first two rows if groups have one
    row each."""
    grouped = axis.grouped and axis.groups < len(axis)
    return axis.slots == 0 if grouped else torch.arange(len(axis)) < 2


def _first_reversed(node: str) -> Scoring:
    """Return a scoring function like that of the first dry run, with the first group's scores of ``node``
    reversed."""
    same = uneven(0)

    def scores(name: str, axis: Axis) -> Tensor:
        values = same(name, axis)
        if name == node:
            first = _first(axis)
            values[first] = values[first].flip(0)
        return values

    return scores


def _differ(update: RecordedUpdate, new: New, also: Mapping[str, Tensor]) -> bool:
    """Return whether replacing columns with ``also`` changes the gradient or the value of the loss."""
    one, other = pushed(update, new), pushed(update, new, also)
    if any(not torch.equal(push, other.by[name]) for name, push in one.by.items()):
        return True
    return not torch.equal(objective(update, new), objective(update, new, also))


def _step(name: str, x: Tensor, sign: int) -> Tensor:
    uneven_steps = torch.linspace(0.2, LARGE_STEP, max(x.numel(), 1)).reshape(x.shape).to(x)
    return (x + sign * uneven_steps).clamp(max=-1e-6) if name == "logprobs" else x + sign * uneven_steps


def _with_holes(mask: Tensor) -> Tensor:
    """Return the mask with False at the second token of every row that has at least three tokens."""
    holes = mask.clone()
    long = mask.sum(1) >= 3
    second = (mask.long().cumsum(1) == 2) & mask & long[:, None]
    return holes & ~second
