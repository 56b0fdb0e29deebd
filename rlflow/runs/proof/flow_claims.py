"""Claims about the flow's own text, judged by rehearsals: the scores reach the gradient, in the right
direction and at the right rows, and what a loss reads has a say in it. They need forwards of the models, and
change no weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import padding
from rlflow.compiler.check.influence import moved
from rlflow.compiler.graph.model import Graph, Op
from rlflow.errors import Place, listed
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.proof.pushes import Push, Row, keys, learned_rows, objective, pushed
from rlflow.runs.proof.rehearsal import (
    RecordedUpdate,
    RehearsalRecord,
    Rehearsals,
    ScoredRows,
    Scoring,
    stretched,
    uneven,
)
from rlflow.training.objective import New

SETS = 6  # of scores
# of made scores, which are from 0 to 1: others are tried where those change nothing, as below a threshold
FACTORS = (1.0, 100.0, -100.0)
FOLLOWS = 0.1  # the least correlation between changes of the scores and changes of the push
# a correlation below it is no accident of the few rows of a rehearsal: what is paid more is made less likely
AGAINST = -0.3
ROUNDING = 1e-4  # of a gradient in float32, over its size
FAR = 0.01  # of a push, over its size, from which steps of an optimizer have to differ
LARGE_STEP = 1.0  # nats by which log-probs are moved, to look at a loss away from the policy that sampled


@dataclass
class FlowClaims:
    """Judges a flow by rehearsals."""

    stage: Rehearsals
    sets: int = SETS  # of scores that are tried

    @property
    def graph(self) -> Graph:
        """The graph of one iteration."""
        return self.stage.plan.graph

    def __post_init__(self) -> None:
        self._news: dict[tuple[str, tuple[Row, ...]], New] = {}
        self._base = self.stage.rehearse(uneven(0))
        # rehearsals with other scores that push otherwise
        self.rescored: list[tuple[RehearsalRecord, dict[str, Push]]] = []

    @property
    def base(self) -> RehearsalRecord:
        """The first rehearsal."""
        return self._base

    @cached_property
    def players(self) -> set[str]:
        """Trained roles that sample; where none does, all trained roles."""
        trained = {use.name for use in self.graph.roles if use.trained}
        return {use.name for use in self.graph.roles if use.trained and use.generates} or trained

    def place(self, node: str) -> Place | None:
        """The line of a call."""
        call = self.graph.by_name.get(node)
        return call.place if call else None

    def new(self, update: RecordedUpdate) -> New:
        """The model's quantities for the rows of an update, computed by the run's own trainer."""
        key = (update.role, tuple(keys(update.batch)))
        if key not in self._news:
            want = tuple(update.loss.new)
            reads = update.batch.select(
                *(n for n in ("prompt_tokens", "tokens", "temperature") if n in update.batch)
            )
            rows = self.stage.lanes.do(
                "model", lambda: self.stage.engine.gather(self.stage.engine.forward(update.role, want, reads))
            )
            self._news[key] = New(**{name: rows[name] for name in want})
        return self._news[key]

    def pushes(self, record: RehearsalRecord) -> dict[str, Push]:
        """The push of each update of a rehearsal, by node; without those that have no row."""
        updates = (learned_rows(update) for update in record.updates)
        return {update.node: pushed(update, self.new(update)) for update in updates if len(update.batch)}

    def claims(self) -> Iterator[Claim]:
        """All claims, most important first."""
        for group in self.groups():
            yield from group

    def groups(self) -> Iterator[list[Claim]]:
        """The claims in groups: first whether rows are pushed towards all rewards, on which it depends
        whether a run begins, then each that needs further rehearsals."""
        begins = list(self.unrehearsed())
        own = self.pushes(self.base)
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
        """What of the iteration the rehearsal did not reach."""
        if (impure := self.stage.impure) is not None:
            yield Claim(
                "rehearsed",
                self.graph.name,
                "unproved",
                f"stage '{impure.name}' has side effects",
                f"{impure.place}; the rehearsal ends before it",
            )
        elif not self.base.updates:
            yield Claim(
                "rehearsed",
                self.graph.name,
                "unproved",
                "the rehearsal had no rows to learn from",
                self.base.skipped,
            )

    # -- rewards
    # --------------------------------------------------------------------------------------------------------

    def rewarded(self, node: str, own: dict[str, Push]) -> tuple[list[Claim], list[Iterator[Claim]]]:
        """Claims about one call of a reward: other scores push otherwise, and towards what is paid more; and
        claims that are not judged yet, about its own rows."""
        if sum(len(rows.scores) for rows in self.base.scored if rows.node == node) < 2:
            return [
                Claim(
                    "reward-reaches",
                    node,
                    "unproved",
                    "the rehearsal had fewer than two rows for it to score",
                )
            ], []
        most = 0.0
        for factor in FACTORS:
            runs = [
                (self.base, own) if factor == 1 else self.pushed_by(uneven(0), factor),
                *(self.pushed_by(uneven(seed, only=node), factor) for seed in range(1, self.sets)),
            ]
            apart = self.apart([pushes for _, pushes in runs])
            if (most := max(apart.values(), default=0.0)) > ROUNDING:
                self.rescored += runs
                break
        number = (
            f"{self.sets} sets of scores{_times(factor)}, gradients apart by up to {most:.3g} of their size"
        )
        if most <= ROUNDING and self.stage.impure is not None:
            return [
                Claim(
                    "reward-reaches",
                    node,
                    "unproved",
                    "other scores make the same updates before that stage",
                    number,
                )
            ], []
        if most <= ROUNDING and (reason := self.waived()):
            why = f"other scores make the same update, and a loss says why: {reason}"
            return [Claim("reward-reaches", node, "unproved", why, number)], []
        claims, further = (
            [
                judged(
                    "reward-reaches",
                    node,
                    most > ROUNDING,
                    ("other scores make another update", "other scores make the same update"),
                    number,
                    self.place(node),
                )
            ],
            [],
        )
        for name in sorted(name for name, value in apart.items() if value > ROUNDING):
            own_runs = [(record, pushes[name]) for record, pushes in runs if name in pushes]
            if (claim := self.direction(node, name, own_runs)) is not None:
                claims.append(claim)
                further += (
                    [self.locality(node, name, own_runs[0], factor)] if claim.verdict != "unproved" else []
                )
        return claims, further

    def pushed_by(self, scoring: Scoring, factor: float) -> tuple[RehearsalRecord, dict[str, Push]]:
        """A rehearsal with scores times a factor, and its pushes."""
        record = self.stage.rehearse(stretched(scoring, factor))
        return record, self.pushes(record)

    def apart(self, runs: list[dict[str, Push]]) -> dict[str, float]:
        """How far the pushes of each update of a role that samples are apart between the first rehearsal and
        the others, at most."""
        own, others = runs[0], runs[1:]
        learning = {name: push for name, push in own.items() if self.graph.by_name[name].role in self.players}
        far = {
            name: max((push.apart(other[name]) for other in others if name in other), default=0.0)
            for name, push in learning.items()
        }
        return far | {name: float("inf") for name in learning if any(name not in other for other in others)}

    def waived(self) -> str:
        """The reason that a loss gives for needing no reward; empty where none does."""
        losses = (term.loss for one in self.base.updates for term in one.terms)
        return next((loss.unrewarded for loss in losses if loss.unrewarded), "")

    def direction(self, node: str, name: str, runs: list[tuple[RehearsalRecord, Push]]) -> Claim | None:
        """Whether what is paid more is made likelier; None where the update learns from other rows than those
        that were scored."""
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
                f"too few of the rows that '{node}' scored are different ones",
            )
        size = max(float(push.of_rows.abs().sum()) for _, push in runs)
        if max(sum(map(abs, push.values())) for _, push in changes) <= ROUNDING * size:
            return Claim(
                "reward-direction",
                name,
                "unproved",
                "only rounding is left of the push, since rows with equal tokens are pushed up and down "
                "alike",
                f"of {size:.3g}",
            )
        follows = _correlation(changes)
        turned = follows < AGAINST
        claim = judged(
            "reward-direction",
            name,
            follows > FOLLOWS,
            (
                f"rows that '{node}' pays more are made likelier",
                f"rows that '{node}' pays more are made less likely"
                if turned
                else f"the push on a row does not follow what '{node}' pays for it",
            ),
            f"correlation {follows:.3f} over {len(changes)} other sets of scores",
            self.place(name),
        )
        return replace(claim, ends_run=turned)

    def locality(
        self, node: str, name: str, base: tuple[RehearsalRecord, Push], factor: float
    ) -> Iterator[Claim]:
        """Change the scores of one group, or of two rows where there are no groups: the push has to change
        most there."""
        axes = [rows.batch.axis for rows in base[0].scored if rows.node == node]
        own = {place for axis in axes for place in axis.keys[_first(axis), 0].tolist()}
        if own == {place for axis in axes for place in axis.keys[:, 0].tolist()}:
            return
        if name not in (pushes := self.pushed_by(_first_turned(node), factor)[1]):
            return
        change: dict[int, float] = {}
        before, after = (_push_by_place(push) for push in (base[1], pushes[name]))
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
                f"turning a few of the scores of '{node}' around changes no push",
            )
            return
        yield judged(
            "reward-place",
            name,
            inside > outside * (1 + ROUNDING),
            (
                "other scores for some rows change the push on those rows most",
                "other scores for some rows change the push on other rows more than on those",
            ),
            f"by {inside:.3g} there, by {outside:.3g} elsewhere",
            self.place(name),
        )

    # -- losses
    # --------------------------------------------------------------------------------------------------------

    def telling(self, update: RecordedUpdate, own: dict[str, Push]) -> tuple[RecordedUpdate, Push | None]:
        """The update with its push, as rehearsed with the first made scores that give it a gradient; as
        rehearsed first where none do."""
        push = own.get(update.node)
        if push is None or bool(push.main.any()) or not self.base.scored:
            return update, push
        for factor in FACTORS[1:]:
            record, pushes = self.pushed_by(uneven(0), factor)
            if (other := pushes.get(update.node)) is not None and bool(other.main.any()):
                return next(learned_rows(one) for one in record.updates if one.node == update.node), other
        return update, push

    def furthest(self, node: str, push: Push | None) -> RecordedUpdate | None:
        """The update with other scores whose push is furthest from ``push``; None where none is far, of which
        `reward-reaches` speaks."""
        apart = [
            (push.apart(pushes[node]), record)
            for record, pushes in self.rescored
            if push is not None and node in pushes
        ]
        most, record = max(apart, key=lambda one: one[0], default=(0.0, None))
        if record is None or most <= FAR:
            return None
        return next(learned_rows(one) for one in record.updates if one.node == node)

    def of_update(self, update: RecordedUpdate, push: Push | None) -> Iterator[Claim]:
        """Claims about one update, whatever its rows were paid."""
        if push is None:
            yield Claim("rehearsed", update.node, "unproved", "no row of the rehearsal could be learned from")
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
        """The model's quantities one large step away, up and down, unequally."""
        new = self.new(update)
        return [
            New(**{name: None if x is None else _step(name, x, sign) for name, x in vars(new).items()})
            for sign in (1, -1)
        ]

    def columns(self, update: RecordedUpdate) -> Iterator[Claim]:
        """Whether each column that a loss reads has a say: in its gradient, or at least in its value or
        metrics."""
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
                f"each column of the loss has influence: {listed(dict.fromkeys(shown))}",
                f"loss '{update.loss.name}' reads {listed(dict.fromkeys(silent))}, without influence on "
                "gradient or metrics",
            ),
            f"{len(news)} policies, 3 sizes, both signs",
            update.loss.place,
        )

    def signs(self, update: RecordedUpdate, push: Push) -> Iterator[Claim]:
        """Directions that need no reward: values nearer to returns, the chosen over the rejected, given
        responses likelier."""
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
                ("values are pushed towards the returns", "values are not pushed towards the returns"),
                f"correlation {toward:.3f}",
                update.loss.place,
            )
        if update.loss.rows == "group" and self.given(update):  # pairs, chosen first
            rows = push.main.double().sum(1) if push.main.dim() == 2 else push.main.double()
            chosen = batch["chosen"].bool() if "chosen" in batch else torch.arange(len(batch)) % 2 == 0
            over = float(rows[chosen].mean() - rows[~chosen].mean())
            yield judged(
                "chosen-direction",
                update.node,
                over > 0,
                (
                    "chosen responses are made likelier than rejected ones",
                    "chosen responses are not made likelier than rejected ones",
                ),
                f"push apart by {over:.3g}",
                update.loss.place,
            )
        elif not self.base.scored and update.loss.new[0] == "logprobs" and self.given(update):
            total = float(push.main.double().sum())
            yield judged(
                "given-direction",
                update.node,
                total > 0,
                (
                    "the responses of the data are made likelier",
                    "the responses of the data are not made likelier",
                ),
                f"push {total:.3g}",
                update.loss.place,
            )

    def given(self, update: RecordedUpdate) -> bool:
        """Whether the rows of an update are the data's own."""
        node = self.graph.by_name[update.node]
        return any(
            item.parameter == "tokens" and self.graph.nodes[item.column.node].op is Op.DATA
            for item in node.inputs
        )

    def beyond(self, update: RecordedUpdate, push: Push) -> Iterator[Claim]:
        """Padding changes nothing, nor does what token columns have at holes of the mask."""
        with padding(float("nan")):
            filled = pushed(update, self.new(update))
        same = push.apart(filled)
        yield judged(
            "padding",
            update.node,
            same <= ROUNDING,
            ("what stands in the padding changes nothing", "what stands in the padding changes the gradient"),
            f"gradients apart by {same:.3g}",
            update.loss.place,
        )
        mask = _with_holes(update.batch["mask"])
        if torch.equal(mask, update.batch["mask"]):
            yield Claim("holes", update.node, "unproved", "no row is long enough for a hole in its mask")
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
                "what columns have at holes of the mask changes nothing",
                "what columns have at holes of the mask changes the gradient",
            ),
            f"gradients apart by {apart:.3g}",
            update.loss.place,
        )


def _times(factor: float) -> str:
    """Say up to which number made scores went; empty where that is 1."""
    return "" if factor == 1 else f" from 0 to {factor:g}"


def _about(update: RecordedUpdate, scored: list[ScoredRows]) -> bool:
    """Whether an update learns from the rows that were scored themselves, and not from others of the same
    prompts."""
    axis = update.batch.axis
    if any(step.step != "taken" for step in axis.line):
        return any(axis.took_from(rows.batch.axis) for rows in scored)
    known = {row for rows in scored for row in keys(rows.batch)}  # no axis says where joined rows are from
    return not known.isdisjoint(keys(update.batch))


def _by_row(scored: list[ScoredRows]) -> dict[Row, float]:
    """The scores of rows that are known by their tokens; of equal rows their sum."""
    sums: dict[Row, float] = {}
    for rows in scored:
        for row, score in zip(keys(rows.batch), rows.scores.tolist(), strict=True):
            sums[row] = sums.get(row, 0.0) + score
    return sums


def _push_by_row(push: Push) -> dict[Row, float]:
    sums: dict[Row, float] = {}
    for row, value in zip(keys(push.rows), push.of_rows.tolist(), strict=True):
        sums[row] = sums.get(row, 0.0) + value
    return sums


Change = tuple[dict[Row, float], dict[Row, float]]


def _change(
    node: str, one: tuple[RehearsalRecord, Push], other: tuple[RehearsalRecord, Push]
) -> Change | None:
    """Differences: by how much scores and pushes differ between two rehearsals, by row; None where no trained
    row was scored in both."""
    before, after = (
        _by_row([row for row in record.scored if row.node == node]) for record, _ in (one, other)
    )
    pushes = [_push_by_row(push) for _, push in (one, other)]
    rows = before.keys() & after.keys()
    if not rows & (pushes[0].keys() | pushes[1].keys()):
        return None
    return (
        {row: after[row] - before[row] for row in rows},
        {row: pushes[1].get(row, 0.0) - pushes[0].get(row, 0.0) for row in rows},
    )


def _correlation(changes: list[Change]) -> float:
    """The correlation of changes of scores with changes of pushes, over all rows and sets."""
    scores = torch.tensor([value for score, _ in changes for value in score.values()], dtype=torch.float64)
    pushes = torch.tensor([push[row] for score, push in changes for row in score], dtype=torch.float64)
    return float(torch.nn.functional.cosine_similarity(scores, pushes, 0))


def _push_by_place(push: Push) -> dict[tuple[int, ...], float]:
    """The push on each row, by its path, which begins with its position in the data."""
    return dict(zip(map(tuple, push.rows.axis.keys.tolist()), push.of_rows.tolist(), strict=True))


def _first(axis: Axis) -> Tensor:
    """bool [rows]: the rows of the first group, or the first two rows where groups have one row."""
    grouped = axis.grouped and axis.groups < len(axis)
    return axis.slots == 0 if grouped else torch.arange(len(axis)) < 2


def _first_turned(node: str) -> Scoring:
    """The first scores again, but for a few rows, whose scores are turned around."""
    same = uneven(0)

    def scores(name: str, axis: Axis) -> Tensor:
        values = same(name, axis)
        if name == node:
            first = _first(axis)
            values[first] = values[first].flip(0)
        return values

    return scores


def _differ(update: RecordedUpdate, new: New, also: Mapping[str, Tensor]) -> bool:
    """Whether other columns make another gradient, or other values."""
    one, other = pushed(update, new), pushed(update, new, also)
    if any(not torch.equal(push, other.by[name]) for name, push in one.by.items()):
        return True
    return not torch.equal(objective(update, new), objective(update, new, also))


def _step(name: str, x: Tensor, sign: int) -> Tensor:
    uneven_steps = torch.linspace(0.2, LARGE_STEP, max(x.numel(), 1)).reshape(x.shape).to(x)
    return (x + sign * uneven_steps).clamp(max=-1e-6) if name == "logprobs" else x + sign * uneven_steps


def _with_holes(mask: Tensor) -> Tensor:
    """The mask with a hole at the second of every row's tokens that has three."""
    holes = mask.clone()
    long = mask.sum(1) >= 3
    second = (mask.long().cumsum(1) == 2) & mask & long[:, None]
    return holes & ~second
