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

    The trainer owns the weights. The generator samples with a copy, or with the same tensors. A version is
    the number of updates that the weights have had.
    """

    trainer: Trainer | None = None
    generator: Generator | None = None
    version: int = 0
    sampled_version: int = 0

    @property
    def stale(self) -> bool:
        """True if the trainer's weights are newer than the weights with which the generator samples."""
        return (
            self.generator is not None and self.trainer is not None and self.sampled_version != self.version
        )

    def synchronise(self) -> None:
        """Send the trainer's weights to the generator if they are newer than the generator's weights."""
        if self.generator is not None and self.trainer is not None and self.stale:
            self.generator.receive(self.trainer.weights(), self.version)
            self.sampled_version = self.version


class KeepsState(Protocol):
    """The part of a trainer that a run saves and restores, in this process or on a pool.

    ``rlflow.training.protocols.Trainer`` explains the methods.
    """

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that are needed to continue training exactly, as copies or as live tensors."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from the state that ``state`` returned."""

    def save(self, folder: Path) -> None:
        """Write the model into ``folder`` as a Hugging Face model folder."""


class RoleModel(Protocol):
    """A role's model as a run sees it, in this process or on pools."""

    version: int  # updates in the trainer's weights
    sampled_version: int  # updates in the generator's weights

    @property
    def trainer(self) -> KeepsState | None:
        """The trainer, which owns the weights; None if the run neither trains this model nor runs forward
        passes with it."""

    @property
    def generator(self) -> Any:
        """The generator, which samples, or its pool; None if the run does not need a generator."""
