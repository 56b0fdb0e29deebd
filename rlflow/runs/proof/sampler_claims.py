"""Claims about a run's samplers, checked on the real weights, which are restored bit for bit afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.compiler.graph.model import Op
from rlflow.execution.engine import Engine
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.proof.flow_claims import FlowClaims
from rlflow.training.protocols import Sampling

State = dict[str, Tensor]
SMALL = 0.02  # standard deviation of the numbers that replace all-zero weights
CLOSE = 2e-3  # tolerance in nats between two float32 computations of a log-prob
CLOSE_SHORT = 0.25  # the same tolerance in a shorter dtype


@dataclass
class SamplerClaims:
    """Checks that changed weights reach a run's samplers."""

    flow: FlowClaims
    short: bool = False  # whether models compute in a dtype shorter than float32

    def __post_init__(self) -> None:
        graph = self.flow.graph
        self.roles = [
            use.name for use in graph.roles if (use.trained or use.follows) and use.name in self.engine.models
        ]
        self.close = CLOSE_SHORT if self.short else CLOSE

    @property
    def engine(self) -> Engine:
        """The run's own engine."""
        return self.flow.stage.engine

    def trainer(self, role: str) -> Any:
        """Return a trained role's trainer, whose state can be restored."""
        trainer = self.engine.models[role].trainer
        assert trainer is not None
        return trainer

    def do(self, call: Any) -> Any:
        """Call ``call`` in the thread that runs the models, and return its result."""
        return self.flow.stage.queues.do("model", call)

    def has_weights(self, role: str) -> bool:
        """Return whether a role has weights that can be changed and restored."""
        trainer = self.engine.models[role].trainer
        return (
            trainer is not None
            and hasattr(trainer, "restore")
            and any(True for _ in weights_of(self.do(trainer.state)))
        )

    @contextlib.contextmanager
    def put_back(self) -> Iterator[None]:
        """Return a context that restores all trained roles on exit, and those that follow them.

        It restores their weights, optimizers and counters, and sends the weights to the samplers again.
        """
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

    def sampler(self, role: str) -> Iterator[Claim]:
        """Check that a role's sampler and trainer agree, at two temperatures and after the weights change.

        The changed weights reach the sampler by the run's own transfer.
        """
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
                    f"sampler and trainer give the same log-probs at temperature {temperature:g}",
                    f"sampler and trainer give different log-probs at temperature {temperature:g}",
                ),
                f"difference up to {apart:.3g}",
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
            f"log-probs changed by {changed:.3g} on average; sampler and trainer differ by {apart:.3g}",
            node.place if node else None,
        )

    def compared(self, role: str, temperature: float) -> tuple[Batch, float]:
        """Sample new rows. Return them with the largest difference between sampler and trainer log-probs."""
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
        """Return the trainer's log-probs for these rows, [rows, T]."""
        own = rows.select("prompt_tokens", "tokens", "temperature")
        return self.do(lambda: self.engine.gather(self.engine.forward(role, ("logprobs",), own)))["logprobs"]  # type: ignore[no-any-return]


def copied(state: Mapping[str, Tensor]) -> State:
    """Copy a trainer's state to host memory."""
    return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}


def weights_of(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weights in float64) for each floating-point parameter in a trainer's state."""
    for name, tensor in state.items():
        if name.startswith(("parameters/", "adapters/")) and tensor.is_floating_point():
            yield name, tensor.double()


def shaken(state: State) -> State:
    """Return a copy of the state with very different weights.

    The noise added to a matrix has a fifth of the matrix's standard deviation.
    """
    chance, result = torch.Generator().manual_seed(5), copied(state)
    for name, tensor in result.items():
        if name.startswith(("parameters/", "adapters/")) and tensor.is_floating_point() and tensor.dim() >= 2:
            noise = torch.randn(tensor.shape, generator=chance, dtype=torch.float32)
            result[name] = (tensor.float() + 0.2 * max(float(tensor.float().std()), SMALL) * noise).to(tensor)
    return result
