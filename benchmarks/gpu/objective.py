"""The losses that sections learn from, and trainers that show their gradients."""

from __future__ import annotations

from typing import Any

import torch

from gpu.models import relative
from rlflow import loss
from rlflow.backends.local import Trainer
from rlflow.training.learning import OptimizerStep


@loss(new=("logprobs", "entropy"))
def surrogate(new: Any, logprobs: Any, advantages: Any) -> Any:
    """PPO's gain without its clip, and a little entropy."""
    return -(new.logprobs - logprobs).exp() * advantages - 0.01 * new.entropy, {}


@loss(new="values")
def squares(new: Any, advantages: Any) -> Any:
    """Of a critic."""
    return (new.values - advantages) ** 2, {}


class Recorder(Trainer):
    """Keeps the gradient of its last step, by name, and takes no step."""

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
    """All of them as one, on the host."""
    return torch.cat([tensor.detach().reshape(-1).double().cpu() for tensor in tensors.values()])


def relative_gradient(found: dict[int, tuple[int, torch.Tensor]]) -> float:
    """By how much the gradients of several ways differ from the first at most."""
    (_, first), *others = found.values()
    return max(relative(gradient, first) for _, gradient in others)
