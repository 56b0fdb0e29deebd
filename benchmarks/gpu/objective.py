"""Losses of the sections, and a trainer that records its gradient."""

from __future__ import annotations

from typing import Any

import torch

from gpu.models import relative
from rlflow import loss
from rlflow.backends.local import Trainer
from rlflow.training.learning import OptimizerStep


@loss(new=("logprobs", "entropy"))
def surrogate(new: Any, logprobs: Any, advantages: Any) -> Any:
    """Return PPO's objective without clipping, with a small entropy bonus."""
    return -(new.logprobs - logprobs).exp() * advantages - 0.01 * new.entropy, {}


@loss(new="values")
def squares(new: Any, advantages: Any) -> Any:
    """Return the squared error of a critic's values."""
    return (new.values - advantages) ** 2, {}


class Recorder(Trainer):
    """A trainer that leaves the weights unchanged and records the gradient of its last step, by parameter
    name.
    """

    def step(self) -> OptimizerStep:
        self.gradients = {
            name: p.grad.detach().clone()
            for name, p in self.network.parameters().items()
            if p.grad is not None
        }
        self.optimizer.zero_grad()
        self.cached.drop()
        return OptimizerStep(
            True, float(torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm()), 0.0
        )


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors to one float64 vector in host memory."""
    return torch.cat([tensor.detach().reshape(-1).double().cpu() for tensor in tensors.values()])


def relative_gradient(found: dict[int, tuple[int, torch.Tensor]]) -> float:
    """Return the largest relative difference between the first gradient and any other gradient."""
    (_, first), *others = found.values()
    return max(relative(gradient, first) for _, gradient in others)
