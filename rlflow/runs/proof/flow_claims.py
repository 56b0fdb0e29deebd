"""Claims about a flow, checked in dry runs.

They say that scores reach the gradient, in the right direction and for the right rows, and that every input
of a loss has an effect. Checking them takes forward passes of the models and doesn't change weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rlflow.author.batch import padding
from rlflow.compiler.check.influence import moved
from rlflow.compiler.graph.due import DueSet
from rlflow.compiler.graph.model import Node, Op
from rlflow.compiler.plan import Plan
from rlflow.errors import StageError, listed
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.proof.directions import Direction, learned_rows, objective, pushed
from rlflow.runs.proof.dry_run import RecordedUpdate, uneven
from rlflow.runs.proof.score_claims import FACTORS, FOLLOWS, ROUNDING, ScoreClaims
from rlflow.training.objective import New

FAR = 0.01  # relative difference of gradients above which optimizer steps must differ
LARGE_NUMBER = 30.0  # added to the numbers of a table if smaller changes have no effect
LARGE_STEP = 1.0  # nats to move log-probs by, to test a loss far from the sampling policy


@dataclass
class FlowClaims(ScoreClaims):
    """Checks the claims about a flow in dry runs."""

    def claims(self) -> Iterator[Claim]:
        """Yield all claims, most important first."""
        for group in self.groups():
            yield from group

    def groups(self) -> Iterator[list[Claim]]:
        """Yield all claims in groups, most important first.

        The first group is about rewards and decides whether a run may start. Each later group takes more dry
        runs.
        """
        begins = list(self.unrehearsed())
        own = self.directions(self.base)
        rewarded = (
            [self.rewarded(node, own) for node in dict.fromkeys(scored.node for scored in self.base.scored)]
            if own
            else []
        )
        yield [*begins, *(claim for claims, _ in rewarded for claim in claims)]
        for due_set, plan in self.stage.variants:
            yield [self.due_together(due_set, plan)]
        for node in self.stage.plan.live:
            if self.graph.nodes[node].op is Op.READ:
                yield [self.remembered(self.graph.nodes[node], own)]
        for locality in (locality for _, further in rewarded for locality in further):
            yield list(locality)
        for update in map(learned_rows, self.base.updates):
            yield list(self.of_update(*self.telling(update, own)))

    def due_together(self, due_set: DueSet, plan: Plan) -> Claim:
        """Check that an iteration runs in which only some calls are due, and the columns of others are None."""
        failure = skipped = ""
        try:
            skipped = self.stage.dry_run_once(uneven(0), plan=plan).skipped
        except StageError as error:
            failure = str(error).splitlines()[0]
        lacking = f"iteration {due_set.first}, without {listed(sorted(due_set.idle))}"
        if skipped:
            return Claim("schedules", self.graph.name, "unproved", f"the dry run skipped {lacking}", skipped)
        sentences = (f"all calls run that are due in {lacking}", f"a call fails in {lacking}")
        return judged("schedules", self.graph.name, not failure, sentences, failure)

    def remembered(self, read: Node, own: dict[str, Direction]) -> Claim:
        """Check that other numbers in a table change which rows an update learns from, or what it learns.

        ``own``: the gradient directions in the first dry run.
        """
        for size in (1.0, -1.0, LARGE_NUMBER):
            try:
                record = self.stage.dry_run_once(uneven(0), shift={read.name: size})
            except StageError:  # a stage may refuse numbers that are never written, such as counts below 0
                continue
            directions = self.directions(record)
            apart = max(
                (
                    push.apart(directions[name]) if name in directions else math.inf
                    for name, push in own.items()
                ),
                default=0.0,
            )
            if apart > ROUNDING or directions.keys() != own.keys():
                sentence = f"what earlier iterations wrote into '{read.memory}' changes the update"
                return Claim(
                    "memory-reaches", read.name, "proved", sentence, f"gradients differ by {apart:.3g}"
                )
        return Claim(
            "memory-reaches",
            read.name,
            "unproved",
            f"no other number in '{read.memory}' changed the update in the dry run, which has few prompts",
            place=read.place,
        )

    def telling(
        self, update: RecordedUpdate, own: dict[str, Direction]
    ) -> tuple[RecordedUpdate, Direction | None]:
        """Return the update and its gradient direction from a dry run where the gradient isn't zero.

        If it is zero in the first dry run, larger synthetic scores are tried. If none of them helps, the
        result is from the first dry run. ``own``: the gradient directions in the first dry run.
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
        """Among the dry runs with other scores, return the update whose gradient differs most from ``push``.

        Returns None if none differs much.
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
        """Check those claims about an update that don't depend on its rows' scores.

        ``push``: the update's gradient direction, or None if it has no trainable rows.
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
        """Return model outputs for the update's rows after a large, uneven step up, and after one down."""
        new = self.new(update)
        return [
            New(**{name: None if x is None else _step(name, x, sign) for name, x in vars(new).items()})
            for sign in (1, -1)
        ]

    def columns(self, update: RecordedUpdate) -> Iterator[Claim]:
        """Check that each column that a loss reads affects the loss or its gradient."""
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
        """Check the update's gradient direction as far as this is possible without a reward.

        Values have to move towards returns, chosen responses have to become more likely than rejected ones,
        and responses from the data have to become more likely.
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
        yield from self._given_direction(update, push)

    def _given_direction(self, update: RecordedUpdate, push: Direction) -> Iterator[Claim]:
        """Check that responses from the data, or the chosen responses of pairs, become more likely."""
        batch = update.batch
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
        """Return whether the update's rows are responses from the data, or encoded from text."""
        node = self.graph.by_name[update.node]
        return any(
            item.parameter == "tokens" and self.graph.nodes[item.column.node].op in (Op.DATA, Op.ENCODE)
            for item in node.inputs
        )

    def beyond(self, update: RecordedUpdate, push: Direction) -> Iterator[Claim]:
        """Check that the gradient doesn't depend on padding or on values at masked-out tokens."""
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


def _differ(update: RecordedUpdate, new: New, also: Mapping[str, Tensor]) -> bool:
    """Return whether replacing columns with ``also`` changes the loss or its gradient."""
    one, other = pushed(update, new), pushed(update, new, also)
    if any(not torch.equal(push, other.by[name]) for name, push in one.by.items()):
        return True
    return not torch.equal(objective(update, new), objective(update, new, also))


def _step(name: str, x: Tensor, sign: int) -> Tensor:
    uneven_steps = torch.linspace(0.2, LARGE_STEP, max(x.numel(), 1)).reshape(x.shape).to(x)
    return (x + sign * uneven_steps).clamp(max=-1e-6) if name == "logprobs" else x + sign * uneven_steps


def _with_holes(mask: Tensor) -> Tensor:
    """Return the mask with the second token set to False in every row that has at least three tokens."""
    holes = mask.clone()
    long = mask.sum(1) >= 3
    second = (mask.long().cumsum(1) == 2) & mask & long[:, None]
    return holes & ~second
