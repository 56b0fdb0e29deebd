"""Claims about a run's own trainers and samplers, checked on their real weights.

They say that an update moves all weights along its gradient, and that the sampler gets the new weights. All
weights are restored bit for bit afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.author.node_options import FollowOptions
from rlflow.errors import listed
from rlflow.execution.engine import CallOptions
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.proof.directions import Direction, learned_rows, pushed
from rlflow.runs.proof.dry_run import RecordedUpdate
from rlflow.runs.proof.sampler_claims import SMALL, SamplerClaims, State, copied, weights_of
from rlflow.training.objective import New
from rlflow.training.protocols import Trainer

# share of a gradient that must remain after cancellation. Below it, the gradient of the weights, which is a
# sum in float32, has fewer than four reliable digits
FELT = 1e-3
MICRO = 24  # tokens of a small micro-batch
LARGE = 1e9  # number of weights above which a model is too large for a second copy in this process


@dataclass
class WeightsClaims(SamplerClaims):
    """Checks the claims about a run's trainers and samplers."""

    # makes a trainer in this process, for each role trained by several ranks
    alone: Mapping[str, Callable[[], Trainer]] = field(default_factory=dict)
    resizing: frozenset[str] = frozenset()  # roles whose trainers can change the number of tokens per pass

    def claims(self) -> Iterator[Claim]:
        """Yield all claims. The models are restored after each update and each role."""
        own = self.flow.directions(self.flow.base)
        for update, dry_run_direction in [
            self.flow.telling(learned_rows(update), own) for update in self.flow.base.updates
        ]:
            if not len(update.batch) or not self.has_weights(update.role):
                yield Claim(
                    "weights",
                    update.node,
                    "unproved",
                    f"the backend of '{update.role}' has no weights, or the update has no rows",
                )
                continue
            with self.put_back():
                yield from self.of_update(update, self.flow.furthest(update.node, dry_run_direction))
                yield from self.following(update)
        for use in self.flow.graph.roles:
            if use.trained and use.generates and self.has_weights(use.name):
                with self.put_back():
                    yield from self.sampler(use.name)

    def of_update(self, update: RecordedUpdate, other: RecordedUpdate | None) -> Iterator[Claim]:
        """Check an update on the real weights.

        It has to move the weights along its gradient, every parameter must have a gradient, and it must not
        matter how rows are split into passes. ``other``: the same update in a dry run with other scores, or
        None.
        """
        start = self.perturbed(update.role)
        here = self.now(update)
        direction = pushed(update, here)
        if (rounding := only_rounding(update.node, direction, here)) is not None:
            yield rounding
            return
        frozen = self.frozen_logprobs(update)
        after = self.updated(update, start)
        yield from self.moves(update, direction, here, distance(start, after))
        yield from self.parameters(update, start, after)
        yield from self.others(update, frozen)
        yield from self.cuts(update, start, after)
        yield from self.order(update, start, after)
        yield from self.ranks(update, start, after)
        if other is not None:
            yield self.again(other, start, after)

    def perturbed(self, role: str) -> State:
        """Replace a role's all-zero tensors with small random weights, and return its new state.

        Weights that are all zero would hide gradients.
        """
        state = self.do(lambda: copied(self.trainer(role).state()))
        chance = torch.Generator().manual_seed(0)
        for name, tensor in state.items():
            if (
                name.startswith(("parameters/", "adapters/"))
                and tensor.is_floating_point()
                and not bool(tensor.any())
            ):
                state[name] = (torch.randn(tensor.shape, generator=chance) * SMALL).to(tensor)
        self.do(lambda: self.trainer(role).restore(copied(state)))
        return dict(state)

    def now(self, update: RecordedUpdate) -> New:
        """Return the model's outputs for the update's rows, with the role's current weights."""
        want, names = tuple(update.loss.new), ("prompt_tokens", "tokens", "temperature")
        rows = update.batch.select(*(name for name in names if name in update.batch))
        result = self.do(lambda: self.engine.gather(self.engine.forward(update.role, want, rows)))
        return New(**{name: result[name] for name in want})

    def updated(self, update: RecordedUpdate, start: State, rows: Batch | None = None) -> State:
        """Return the trainer's state after one optimizer step from ``start`` on all rows of the update.

        The update's epochs and minibatches are ignored. ``rows``: rows to use instead of the
        update's own.
        """
        options = replace(update.options, epochs=1, minibatch=None)
        self.do(lambda: self.trainer(update.role).restore(copied(start)))
        self.do(
            lambda: self.engine.update(
                update.role, rows or update.batch, update.loss, options, update.settings, update.call
            )
        )
        return self.do(lambda: copied(self.trainer(update.role).state()))  # type: ignore[no-any-return]

    def moves(self, update: RecordedUpdate, direction: Direction, here: New, moved: float) -> Iterator[Claim]:
        """Check that the update changes the weights, and that the model's outputs move along the gradient.

        ``here``: the model's outputs before the update. ``moved``: how much the weights changed, relative to
        their norm.
        """
        place = self.flow.place(update.node)
        yield judged(
            "weights-move",
            update.node,
            moved > 0,
            ("the update changes the weights", "the update changes no weight"),
            f"by {moved:.3g} of their size",
            place,
        )
        name = update.loss.new[0]
        before, wanted = getattr(here, name), direction.by[name].double().flatten()
        change = (getattr(self.now(update), name) - before).double()
        change = torch.where(update.batch["mask"], change, 0.0) if change.dim() == 2 else change
        if not bool(wanted.any()) or moved == 0:
            yield Claim(
                "weights-direction",
                update.node,
                "unproved",
                "the gradient is zero on these rows, or no weight moved",
            )
            return
        along = float(torch.nn.functional.cosine_similarity(wanted, change.flatten(), 0))
        yield judged(
            "weights-direction",
            update.node,
            along > 0,
            (
                "the update moves the model along the gradient of the loss",
                "the update does not move the model along the gradient of the loss",
            ),
            f"correlation {along:.3f}",
            place,
        )

    def parameters(self, update: RecordedUpdate, start: State, after: State) -> Iterator[Claim]:
        """Check that every trained parameter has a nonzero gradient, using the optimizer's first moments."""
        known = {
            name.removeprefix("exp_avg/"): bool(tensor.any())
            for name, tensor in after.items()
            if name.startswith("exp_avg/")
        }
        names = [name.partition("/")[2] for name in after if name.startswith(("parameters/", "adapters/"))]
        if not known:
            yield Claim("parameters", update.node, "unproved", "the trainer's state has no first moments")
            return
        trained = list(known) if any(name.startswith("adapters/") for name in after) else names
        none, zero = [n for n in trained if n not in known], [n for n, there in known.items() if not there]
        parts = [
            f"{len(group)} {what}: {listed(modules(group), 4)}"
            for group, what in ((none, "without a gradient"), (zero, "with a zero gradient"))
            if group
        ]
        yield judged(
            "parameters",
            update.node,
            not none and not zero,
            ("every trained parameter has a gradient", "some parameters have no gradient"),
            "; ".join(parts) or f"{len(known)} parameters",
            self.flow.place(update.node),
        )

    def frozen_logprobs(self, update: RecordedUpdate) -> dict[str, Tensor]:
        """Return the log-probs of the update's rows [rows, T] for each role that isn't trained."""
        names = [
            use.name
            for use in self.flow.graph.roles
            if not use.trained and use.head == "logprobs" and use.name in self.engine.models
        ]
        rows = update.batch.select("prompt_tokens", "tokens")
        return {
            role: self.do(
                lambda role=role: self.engine.gather(self.engine.forward(role, ("logprobs",), rows))
            )["logprobs"]
            for role in names
            if self.engine.models[role].trainer is not None
        }

    def others(self, update: RecordedUpdate, before: Mapping[str, Tensor]) -> Iterator[Claim]:
        """Check that the update doesn't change roles that aren't trained.

        ``before``: what `frozen_logprobs` returned before the update.
        """
        after = self.frozen_logprobs(update) if before else {}
        for role, logprobs in before.items():
            apart = float((after[role] - logprobs).abs().max())
            yield judged(
                "frozen",
                role,
                torch.equal(after[role], logprobs),
                (
                    f"training '{update.role}' does not change it",
                    f"training '{update.role}' changes it",
                ),
                f"log-probs differ by {apart:.3g}",
                self.flow.place(update.node),
            )

    def following(self, update: RecordedUpdate) -> Iterator[Claim]:
        """Check that roles that follow the update's role move towards its new weights as declared."""
        for node in self.flow.graph.nodes:
            if not isinstance(node.settings, FollowOptions) or node.settings.follows != update.role:
                continue
            role, mix = str(node.role), node.settings.mix
            before = dict(weights_of(self.do(lambda role=role: copied(self.trainer(role).state()))))
            other = dict(weights_of(self.do(lambda: copied(self.trainer(update.role).state()))))
            options = CallOptions(node=node.name)
            self.do(partial(self.engine.follow, role, update.role, mix, True, options))
            after = dict(weights_of(self.do(lambda role=role: copied(self.trainer(role).state()))))
            apart = [far_from_mix(before[name], other[name], tensor, mix) for name, tensor in after.items()]
            yield judged(
                "follows",
                node.name,
                max(apart) <= 1,
                (
                    f"its weights move {mix:g} of the way towards those of '{update.role}'",
                    f"its weights do not move {mix:g} of the way towards those of '{update.role}'",
                ),
                f"difference up to {max(apart):.3g} of rounding",
                node.place,
            )

    def cuts(self, update: RecordedUpdate, start: State, after: State) -> Iterator[Claim]:
        """Check that small micro-batches give the same gradient.

        ``after``: the trainer's state after the update from ``start``. The claim is unproved if the trainer
        can't change the size of micro-batches.
        """
        trainer = self.trainer(update.role)
        if update.role not in self.resizing:
            yield Claim(
                "micro-batches",
                update.node,
                "unproved",
                "the trainer cannot change the number of tokens per pass",
            )
            return
        before = self.do(lambda: trainer.resize_passes(MICRO))
        try:
            small = self.updated(update, start)
        finally:
            self.do(lambda: trainer.resize_passes(before))
        apart = moments_distance(after, small)
        yield judged(
            "micro-batches",
            update.node,
            apart < 1e-3,
            (
                "the gradient does not depend on micro-batches",
                "the gradient depends on how rows are split into micro-batches",
            ),
            f"difference {apart:.3g} of its size",
            self.flow.place(update.node),
        )

    def order(self, update: RecordedUpdate, start: State, after: State) -> Iterator[Claim]:
        """Check that the gradient stays the same if the order of groups is reversed.

        Each rank then gets other groups. ``after``: the trainer's state after the update from ``start``.
        """
        slots = update.batch.axis.slots
        if not any(name.startswith("exp_avg/") for name in after) or int(slots.max()) == 0:
            yield Claim(
                "row-order",
                update.node,
                "unproved",
                "the trainer's state has no first moments, or the rows are a single group",
            )
            return
        turned = self.updated(update, start, update.batch.rows(torch.argsort(-slots, stable=True)))
        apart = moments_distance(after, turned)
        yield judged(
            "row-order",
            update.node,
            apart < 1e-3,
            (
                "the gradient does not depend on the order of rows or on their rank",
                "the gradient depends on the order of rows, or on their rank",
            ),
            f"difference {apart:.3g} of its size",
            self.flow.place(update.node),
        )

    def ranks(self, update: RecordedUpdate, start: State, after: State) -> Iterator[Claim]:
        """Check that several ranks compute the same gradient together as this process does alone.

        This process uses its CPU and all rows. ``after``: the trainer's state after the update from
        ``start``.
        """
        if update.role not in self.alone:
            return
        size = sum(tensor.numel() for _, tensor in weights_of(start))
        if size > LARGE or not any(name.startswith("exp_avg/") for name in after):
            yield Claim(
                "ranks",
                update.node,
                "unproved",
                "the trainer's state has no first moments, or is too large for one process",
            )
            return
        one = self.alone[update.role]()
        one.restore(copied(start))
        one.update(update.batch, update.loss, mean=update.options.mean, seed=0, **update.settings)
        apart = moments_distance(one.state(), after)
        yield judged(
            "ranks",
            update.node,
            apart < (0.05 if self.short else 1e-3),
            (
                "all ranks together compute the same gradient as one process with all rows",
                "all ranks together compute a different gradient than one process with all rows",
            ),
            f"difference {apart:.3g} of its size",
            self.flow.place(update.node),
        )

    def again(self, other: RecordedUpdate, start: State, after: State) -> Claim:
        """Return the claim that different scores move the real weights differently.

        ``other``: the update with other scores. ``after``: the state after the update with the first scores,
        from ``start``.
        """
        state = self.updated(other, start)
        apart, size = distance(after, state), distance(start, after)
        return judged(
            "weights-scores",
            other.node,
            apart > 1e-3 * size,
            ("different scores move the weights differently", "different scores move the weights equally"),
            f"difference {apart / size if size else 0:.3g} of the step",
            self.flow.place(other.node),
        )


def only_rounding(node: str, direction: Direction, new: New) -> Claim | None:
    """Return a claim if an update's gradient is nothing but rounding errors, or None otherwise.

    With such a claim, the claims about weights aren't checked. ``new``: the model's outputs.
    """
    left, followed = direction.felt(new)
    if followed > FELT:
        return None
    why = (
        "rows with equal tokens are pushed up and down equally"
        if left <= FELT
        else "the model is certain of every token"
    )
    return Claim(
        "weights",
        node,
        "unproved",
        f"the gradient is only rounding, because {why}",
        f"{followed:.1g} of it is left after cancellation",
    )


def far_from_mix(own: Tensor, other: Tensor, after: Tensor, mix: float) -> float:
    """Return how far ``after`` is from the mean of two tensors, as a share of what float32 may round."""
    rounding = 4 * torch.finfo(torch.float32).eps * (own.abs() + other.abs())
    apart = (after - ((1 - mix) * own + mix * other)).abs()
    return float((apart / rounding.clamp(min=torch.finfo(torch.float32).tiny)).max())


def distance(one: State, other: State) -> float:
    """Return the distance between the weights of two states, relative to the norm of the first."""
    apart = sum(float((tensor - other[name].double()).square().sum()) for name, tensor in weights_of(one))
    size = sum(float(tensor.square().sum()) for _, tensor in weights_of(one))
    return float((apart / size) ** 0.5) if size else 0.0


def moments_distance(one: State, other: State) -> float:
    """Return the distance between the first moments of two states, relative to the norm of the first.

    After a single step, the first moments are proportional to the gradient.
    """
    names = [name for name in one if name.startswith("exp_avg/")]
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in names)
    size = sum(float(one[name].double().square().sum()) for name in names)
    return float((apart / size) ** 0.5) if size else 0.0


def modules(names: list[str]) -> list[str]:
    """Return the names of the modules that contain these parameters, each only once."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
