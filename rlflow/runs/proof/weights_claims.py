"""Claims about the run's own trainers and samplers, judged on their real weights: an update moves them as its
gradient says, all of them, and what samples follows. Whatever is changed is put back, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.compiler.graph.model import Op
from rlflow.errors import listed
from rlflow.execution.engine import Engine
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.proof.flow_claims import FlowClaims
from rlflow.runs.proof.pushes import Push, learned_rows, pushed
from rlflow.runs.proof.rehearsal import RecordedUpdate
from rlflow.training.objective import New
from rlflow.training.protocols import Sampling, Trainer

State = dict[str, Tensor]
SMALL = 0.02  # deviation of what stands in the place of weights that begin at zero
CLOSE = 2e-3  # nats between two computations of a log-prob in float32
CLOSE_SHORT = 0.25  # in a shorter dtype
# the share of a push below which the gradient of the weights, a sum in float32, has fewer than four digits
# besides rounding
FELT = 1e-3
MICRO = 24  # tokens of a small micro-batch
LARGE = 1e9  # weights of a model that is too large to be trained in this process too


@dataclass
class WeightsClaims:
    """Judges trainers and samplers of a run."""

    flow: FlowClaims
    short: bool = False  # whether models compute in a dtype shorter than float32
    # role that several ranks train → makes its trainer here
    alone: Mapping[str, Callable[[], Trainer]] = field(default_factory=dict)
    resizing: frozenset[str] = frozenset()  # roles whose trainers can be told how many tokens a pass may have

    def __post_init__(self) -> None:
        graph = self.flow.graph
        self.roles = [use.name for use in graph.roles if use.trained and use.name in self.engine.models]
        self.close = CLOSE_SHORT if self.short else CLOSE

    @property
    def engine(self) -> Engine:
        """The run's own engine."""
        return self.flow.stage.engine

    def trainer(self, role: str) -> Any:
        """The trainer of a role that is trained, whose state can be put back."""
        trainer = self.engine.models[role].trainer
        assert trainer is not None
        return trainer

    def do(self, call: Any) -> Any:
        """Make a call in the thread that works with models."""
        return self.flow.stage.lanes.do("model", call)

    def claims(self) -> Iterator[Claim]:
        """All claims; the models are put back after each."""
        own = self.flow.pushes(self.flow.base)
        for update, rehearsed_push in [
            self.flow.telling(learned_rows(update), own) for update in self.flow.base.updates
        ]:
            if not len(update.batch) or not self.has_weights(update.role):
                yield Claim(
                    "weights",
                    update.node,
                    "unproved",
                    f"the backend of '{update.role}' has no weights, or there are no rows",
                )
                continue
            with self.put_back():
                yield from self.of_update(update, self.flow.furthest(update.node, rehearsed_push))
        for use in self.flow.graph.roles:
            if use.trained and use.generates and self.has_weights(use.name):
                with self.put_back():
                    yield from self.sampler(use.name)

    def has_weights(self, role: str) -> bool:
        """Whether a role has weights that can be changed and put back."""
        trainer = self.engine.models[role].trainer
        return (
            trainer is not None
            and hasattr(trainer, "restore")
            and any(True for _ in _weights(self.do(lambda: trainer.state())))
        )

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Put weights, optimizers and counters of all trained roles back to what they are now; samplers get
        their weights again."""
        saved = {
            role: self.do(lambda role=role: copied(self.trainer(role).state()))
            for role in self.roles
            if hasattr(self.engine.models[role].trainer, "restore")
        }
        versions = {role: model.version for role, model in self.engine.models.items()}
        try:
            yield
        finally:
            for role, state in saved.items():
                self.do(lambda role=role, state=state: self.trainer(role).restore(state))
                model = self.engine.models[role]
                changed = model.version != versions[role] or model.sampled_version != versions[role]
                model.version = versions[role]
                if changed and model.generator is not None:
                    model.sampled_version = -1
                    self.do(lambda model=model: model.synchronise())

    # -- updates
    # --------------------------------------------------------------------------------------------------------

    def of_update(self, update: RecordedUpdate, other: RecordedUpdate | None) -> Iterator[Claim]:
        """An update moves the weights as its gradient says; every parameter has one; how rows are cut into
        passes changes nothing.
        ``other``: the update with other scores."""
        start = self.perturbed(update.role)
        here = self.now(update)
        push = pushed(update, here)
        if (rounding := only_rounding(update.node, push, here)) is not None:
            yield rounding
            return
        frozen = self.frozen_logprobs(update)
        after = self.updated(update, start)
        yield from self.moves(update, push, here, distance(start, after))
        yield from self.parameters(update, start, after)
        yield from self.others(update, frozen)
        yield from self.cuts(update, start, after)
        yield from self.order(update, start, after)
        yield from self.ranks(update, start, after)
        if other is not None:
            yield self.again(other, start, after)

    def perturbed(self, role: str) -> State:
        """Restore the role's state with small numbers in place of tensors that are all zero, behind which
        gradients hide."""
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
        """The model's quantities with the weights that it has now."""
        want, names = tuple(update.loss.new), ("prompt_tokens", "tokens", "temperature")
        rows = update.batch.select(*(name for name in names if name in update.batch))
        result = self.do(lambda: self.engine.gather(self.engine.forward(update.role, want, rows)))
        return New(**{name: result[name] for name in want})

    def updated(self, update: RecordedUpdate, start: State, rows: Batch | None = None) -> State:
        """The state after one step on all rows, from ``start``; ``after=`` and epochs are set aside."""
        options = replace(update.options, epochs=1, minibatch=None, after=0)
        self.do(lambda: self.trainer(update.role).restore(copied(start)))
        self.do(
            lambda: self.engine.update(
                update.role, rows or update.batch, update.loss, options, update.settings, update.call
            )
        )
        return self.do(lambda: copied(self.trainer(update.role).state()))  # type: ignore[no-any-return]

    def moves(self, update: RecordedUpdate, push: Push, here: New, moved: float) -> Iterator[Claim]:
        """Whether weights moved, and whether the model then computes what the gradient pushed towards."""
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
        before, wanted = getattr(here, name), push.by[name].double().flatten()
        change = (getattr(self.now(update), name) - before).double()
        change = torch.where(update.batch["mask"], change, 0.0) if change.dim() == 2 else change
        if not bool(wanted.any()) or moved == 0:
            yield Claim(
                "weights-direction", update.node, "unproved", "there is no push to follow on these rows"
            )
            return
        along = float(torch.nn.functional.cosine_similarity(wanted, change.flatten(), 0))
        yield judged(
            "weights-direction",
            update.node,
            along > 0,
            (
                "the model moves where the gradient pushes it",
                "the model does not move where the gradient of the loss pushes it",
            ),
            f"correlation {along:.3f}",
            place,
        )

    def parameters(self, update: RecordedUpdate, start: State, after: State) -> Iterator[Claim]:
        """Find parameters without gradient: none at all, or one that is zero. Read from the optimizer's first
        moments."""
        known = {
            name.removeprefix("exp_avg/"): bool(tensor.any())
            for name, tensor in after.items()
            if name.startswith("exp_avg/")
        }
        names = [name.partition("/")[2] for name in after if name.startswith(("parameters/", "adapters/"))]
        if not known:
            yield Claim("parameters", update.node, "unproved", "the trainer's state shows no first moments")
            return
        trained = list(known) if any(name.startswith("adapters/") for name in after) else names
        none, zero = [n for n in trained if n not in known], [n for n, there in known.items() if not there]
        parts = [
            f"{len(group)} {what}: {listed(modules(group), 4)}"
            for group, what in ((none, "without any"), (zero, "zero"))
            if group
        ]
        yield judged(
            "parameters",
            update.node,
            not none and not zero,
            ("every parameter that is trained has a gradient", "some parameters have no gradient"),
            "; ".join(parts) or f"{len(known)} parameters",
            self.flow.place(update.node),
        )

    def frozen_logprobs(self, update: RecordedUpdate) -> dict[str, Tensor]:
        """Log-probs of the rows by the models that are not trained."""
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
        """Models that are not trained stay as they are when others are."""
        after = self.frozen_logprobs(update) if before else {}
        for role, logprobs in before.items():
            apart = float((after[role] - logprobs).abs().max())
            yield judged(
                "frozen",
                role,
                torch.equal(after[role], logprobs),
                (
                    f"it stays as it is when '{update.role}' is trained",
                    f"it changes when '{update.role}' is trained",
                ),
                f"log-probs apart by {apart:.3g}",
                self.flow.place(update.node),
            )

    def cuts(self, update: RecordedUpdate, start: State, after: State) -> Iterator[Claim]:
        """A trainer gives equal gradients in small micro-batches, where it can be told their size."""
        trainer = self.trainer(update.role)
        if update.role not in self.resizing:
            yield Claim(
                "micro-batches",
                update.node,
                "unproved",
                "the trainer cannot be told how many tokens a pass may have",
            )
            return
        before = self.do(lambda: trainer.resize_passes(MICRO))
        try:
            small = self.updated(update, start)
        finally:
            self.do(lambda: trainer.resize_passes(before))
        apart = moments_apart(after, small)
        yield judged(
            "micro-batches",
            update.node,
            apart < 1e-3,
            (
                "the gradient does not depend on micro-batches",
                "the gradient depends on how rows are cut into micro-batches",
            ),
            f"apart by {apart:.3g} of its size",
            self.flow.place(update.node),
        )

    def order(self, update: RecordedUpdate, start: State, after: State) -> Iterator[Claim]:
        """A trainer gives equal gradients for the groups of rows in reverse order, in which other ranks
        compute them."""
        slots = update.batch.axis.slots
        if not any(name.startswith("exp_avg/") for name in after) or int(slots.max()) == 0:
            yield Claim(
                "row-order",
                update.node,
                "unproved",
                "the trainer's state shows no first moments, or there is one group of rows",
            )
            return
        turned = self.updated(update, start, update.batch.rows(torch.argsort(-slots, stable=True)))
        apart = moments_apart(after, turned)
        yield judged(
            "row-order",
            update.node,
            apart < 1e-3,
            (
                "the gradient does not depend on the order of rows, nor on which rank has them",
                "the gradient depends on the order of rows, or on which rank has them",
            ),
            f"apart by {apart:.3g} of its size",
            self.flow.place(update.node),
        )

    def ranks(self, update: RecordedUpdate, start: State, after: State) -> Iterator[Claim]:
        """Several ranks have the gradient of one process that has all rows. The process is this one, with a
        trainer on its CPU."""
        if update.role not in self.alone:
            return
        size = sum(tensor.numel() for _, tensor in _weights(start))
        if size > LARGE or not any(name.startswith("exp_avg/") for name in after):
            yield Claim(
                "ranks",
                update.node,
                "unproved",
                "the trainer's state shows no first moments, or is too large for one process",
            )
            return
        one = self.alone[update.role]()
        one.restore(copied(start))
        one.update(update.batch, update.loss, mean=update.options.mean, seed=0, **update.settings)
        apart = moments_apart(one.state(), after)
        yield judged(
            "ranks",
            update.node,
            apart < (0.05 if self.short else 1e-3),
            (
                "all ranks together have the gradient of one process",
                "all ranks together have another gradient than one process that has all rows",
            ),
            f"apart by {apart:.3g} of its size",
            self.flow.place(update.node),
        )

    def again(self, other: RecordedUpdate, start: State, after: State) -> Claim:
        """Other scores move the real weights otherwise."""
        state = self.updated(other, start)
        apart, size = distance(after, state), distance(start, after)
        return judged(
            "weights-scores",
            other.node,
            apart > 1e-3 * size,
            ("other scores move the weights otherwise", "other scores move the weights alike"),
            f"apart by {apart / size if size else 0:.3g} of the step",
            self.flow.place(other.node),
        )

    # -- samplers
    # --------------------------------------------------------------------------------------------------------

    def sampler(self, role: str) -> Iterator[Claim]:
        """A known large change of the trainer's weights reaches what samples, by the run's own transfer; and
        its temperature is applied."""
        node = next(
            (node for node in self.flow.graph.nodes if node.role == role and node.op is Op.GENERATE), None
        )
        model = self.engine.models[role]
        state = self.do(lambda: copied(self.trainer(role).state()))
        for temperature in (1.0, 0.6):
            rows, apart = self.compared(role, temperature)
            yield judged(
                "sampler",
                role,
                apart < self.close,
                (
                    f"the sampler's log-probs are the trainer's, at temperature {temperature:g}",
                    f"the sampler's log-probs are not the trainer's, at temperature {temperature:g}",
                ),
                f"apart by up to {apart:.3g}",
                node.place if node else None,
            )
        before = self.logprobs(role, rows)
        self.do(lambda: self.trainer(role).restore(shaken(state)))
        model.version += 1
        changed = float((self.logprobs(role, rows) - before).abs().mean())
        _, apart = self.compared(role, 1.0)
        yield judged(
            "sampler-follows",
            role,
            apart < max(self.close, 0.02 * changed),
            (
                "a large change of weights reaches the sampler",
                "a large change of weights does not reach the sampler",
            ),
            f"log-probs changed by {changed:.3g} in the mean, sampler and trainer apart by {apart:.3g}",
            node.place if node else None,
        )

    def compared(self, role: str, temperature: float) -> tuple[Batch, float]:
        """Rows sampled now, and the largest difference of their sampled log-probs from the trainer's."""
        sampling = Sampling(samples=2, max_tokens=self.flow.stage.longest, temperature=temperature)
        prompts = self.flow.stage.prompts
        rows = self.do(lambda: self.engine.gather(self.engine.sample(role, prompts, sampling, 17)))
        index = rows.axis.index
        assert index is not None
        rows = Batch(
            rows.axis, rows.data | {"prompt_tokens": prompts.data["prompt_tokens"].take(index, prompts.axis)}
        )
        mask = rows["mask"]
        apart = (rows["sampled_logprobs"] - self.logprobs(role, rows))[mask].abs()
        return rows, float(apart.max()) if len(apart) else 0.0

    def logprobs(self, role: str, rows: Batch) -> Tensor:
        """Log-probs of rows by the trainer, [rows, T]."""
        own = rows.select("prompt_tokens", "tokens", "temperature")
        return self.do(lambda: self.engine.gather(self.engine.forward(role, ("logprobs",), own)))["logprobs"]  # type: ignore[no-any-return]


def only_rounding(node: str, push: Push, new: New) -> Claim | None:
    """The claim in the place of those about the weights where their gradient is only rounding; None where it
    is more."""
    left, followed = push.felt(new)
    if followed > FELT:
        return None
    why = (
        "rows with equal tokens are pushed up and down alike"
        if left <= FELT
        else "the model is certain of each of their tokens"
    )
    return Claim(
        "weights",
        node,
        "unproved",
        f"the gradient is only rounding, since {why}",
        f"{followed:.1g} of the push on the rows is left",
    )


def copied(state: Mapping[str, Tensor]) -> State:
    """A copy of a state in host memory."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def _weights(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        if name.startswith(("parameters/", "adapters/")) and tensor.is_floating_point():
            yield name, tensor.double()


def distance(one: State, other: State) -> float:
    """How far the weights of two states are apart, over the size of the first."""
    apart = sum(float((tensor - other[name].double()).square().sum()) for name, tensor in _weights(one))
    size = sum(float(tensor.square().sum()) for _, tensor in _weights(one))
    return float((apart / size) ** 0.5) if size else 0.0


def moments_apart(one: State, other: State) -> float:
    """How far the first moments of two states are apart, over the size of the first: after one step they are
    the gradient's."""
    names = [name for name in one if name.startswith("exp_avg/")]
    apart = sum(float((one[name].double() - other[name].double()).square().sum()) for name in names)
    size = sum(float(one[name].double().square().sum()) for name in names)
    return float((apart / size) ** 0.5) if size else 0.0


def shaken(state: State) -> State:
    """The state with weights that are far from what they were: each matrix is moved by a fifth of its own
    deviation."""
    chance, result = torch.Generator().manual_seed(5), copied(state)
    for name, tensor in result.items():
        if name.startswith(("parameters/", "adapters/")) and tensor.is_floating_point() and tensor.dim() >= 2:
            noise = torch.randn(tensor.shape, generator=chance, dtype=torch.float32)
            result[name] = (tensor.float() + 0.2 * max(float(tensor.float().std()), SMALL) * noise).to(tensor)
    return result


def modules(names: list[str]) -> list[str]:
    """The modules that parameters belong to, each once."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
