"""What an environment answers to a turn of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Turn:
    """The answer of an environment to what the model said in a turn.

    says: text, which goes on where the model stopped, or messages (``[{"role": …, "content": …}]``), which the chat template puts as a
    next turn; nothing ends the episode. reward: of this turn. done: whether the episode ends here. log: numbers by name, whose means over
    the episodes of an iteration are metrics.
    """

    says: str | Sequence[Mapping[str, str]] = ""
    reward: float = 0.0
    done: bool = False
    log: Mapping[str, Any] = field(default_factory=dict)
