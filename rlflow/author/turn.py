"""``Turn``, which an environment returns for each turn of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Turn:
    """What an environment returns for a turn of the model: its answer, a reward, and whether to stop."""

    # text, which continues where the model stopped; or messages (``[{"role": …, "content": …}]``), which the
    # chat template renders as the next turn. An empty value ends the episode.
    says: str | Sequence[Mapping[str, str]] = ""
    reward: float = 0.0  # reward of this turn
    done: bool = False  # True ends the episode
    # name → number; its mean over the episodes of an iteration is a metric
    log: Mapping[str, Any] = field(default_factory=dict)
