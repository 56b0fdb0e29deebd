"""What an environment answers to a turn of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Turn:
    """The answer of an environment to what the model said in a turn."""

    # text, which goes on where the model stopped, or messages (``[{"role": …, "content": …}]``), which the
    # chat template puts as a next turn; nothing ends the episode
    says: str | Sequence[Mapping[str, str]] = ""
    reward: float = 0.0  # of this turn
    done: bool = False  # whether the episode ends here
    # numbers by name, whose means over the episodes of an iteration are metrics
    log: Mapping[str, Any] = field(default_factory=dict)
