"""A role's model: its trainer, its generator, and the version of the weights of each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from rlflow.training.protocols import Generator, Trainer


@dataclass
class Model:
    """A role's weights: the trainer, the generator, and the version of each.

    The trainer owns the weights, and the generator samples from a copy or from the same tensors. A version is
    the number of updates that the weights have had.
    """

    trainer: Trainer | None = None
    generator: Generator | None = None
    version: int = 0
    sampled_version: int = 0

    @property
    def stale(self) -> bool:
        """Whether the trainer's weights are newer than the weights that the generator samples with."""
        return (
            self.generator is not None and self.trainer is not None and self.sampled_version != self.version
        )

    def synchronise(self) -> None:
        """Send the trainer's weights to the generator if they are newer."""
        if self.generator is not None and self.trainer is not None and self.stale:
            self.generator.receive(self.trainer.weights(), self.version)
            self.sampled_version = self.version


class KeepsState(Protocol):
    """The part of a trainer that a run saves and restores, in this process or on a pool.

    See ``rlflow.training.protocols.Trainer``.
    """

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that a bit-equal continuation needs, as a copy or as live tensors."""

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from a state that ``state`` returned."""

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder."""


class RoleModel(Protocol):
    """A role's model as a run sees it, in this process or on pools."""

    version: int  # updates in the trainer's weights
    sampled_version: int  # updates in the generator's weights

    @property
    def trainer(self) -> KeepsState | None:
        """The trainer, which owns the weights; None if the run does not train or compute with this model."""

    @property
    def generator(self) -> Any:
        """The generator, which samples from the weights, or its pool; None if the run does not need one."""
