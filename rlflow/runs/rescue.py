"""What is saved of a run that an error ends: its state between two iterations, the newest that is still there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.author.figures import Figure, Of
from rlflow.execution.engine import Engine


@dataclass(frozen=True)
class Between:
    """A run before an iteration, as long as its models have the weights of then."""

    iteration: int
    cursor: Mapping[str, Any]  # of the prompts
    scalars: Mapping[str, float]  # that live across iterations
    versions: Mapping[str, int]  # role → updates behind its weights

    @staticmethod
    def of(engine: Engine, iteration: int, cursor: Mapping[str, Any]) -> Between:
        """What a run is before an iteration that comes now."""
        return Between(iteration, cursor, dict(engine.state), {role: model.version for role, model in engine.models.items()})

    def put_back(self, engine: Engine) -> None:
        """Put back what is not weights: flows set scalars, and updates that took no step have raised versions."""
        engine.state = dict(self.scalars)
        for role, version in self.versions.items():
            engine.models[role].version = version


def took_steps(figures: Mapping[Figure, float]) -> bool:
    """Whether an iteration's updates changed weights. An update that says nothing of its steps may have."""
    steps = [value for figure, value in figures.items() if figure.of is Of.UPDATE and figure.name == "steps"]
    return not steps or any(steps)
