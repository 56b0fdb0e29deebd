"""A role's model: its trainer, its generator, and the versions of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rlflow.training.protocols import Generator, Trainer


@dataclass
class Model:
    """A role's trainer and generator in this process, and the versions of their weights.

    The trainer owns the weights. The generator samples with a copy, or shares the tensors. A version is the
    number of updates made to the weights so far.
    """

    trainer: Trainer | None = None
    generator: Generator | None = None
    version: int = 0
    sampled_version: int = 0

    @property
    def stale(self) -> bool:
        """True if the trainer's weights are newer than those the generator samples with."""
        return (
            self.generator is not None and self.trainer is not None and self.sampled_version != self.version
        )

    def synchronise(self) -> None:
        """Send the trainer's weights to the generator if they are newer than the ones it has."""
        if self.generator is not None and self.trainer is not None and self.stale:
            self.generator.receive(self.trainer.weights(), self.version)
            self.sampled_version = self.version


class KeepsState(Protocol):
    """What a run saves and restores of a trainer, in this process or on a pool.

    See ``rlflow.training.protocols.Trainer`` for the methods.
    """

    def state(self) -> dict[str, Tensor]:
        """Return all tensors needed to continue training exactly, as copies or as live tensors."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from what ``state`` returned."""

    def save(self, folder: Path) -> None:
        """Write the model into ``folder`` as a Hugging Face model folder."""


class RoleModel(Protocol):
    """A role's model as a run sees it, in this process or on pools."""

    version: int  # number of updates made to the trainer's weights
    sampled_version: int  # number of updates made to the generator's weights

    @property
    def trainer(self) -> KeepsState | None:
        """The trainer, which owns the weights, or None if the run doesn't need one.

        It's needed to train this model or to run forward passes with it.
        """

    @property
    def generator(self) -> Any:
        """The generator, which samples, or its pool. None if the run doesn't need one."""
