"""When a row ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.backends.local.tokenizer import texts

MARGIN = 8  # tokens decoded before the place where a stop string can begin, so that it never begins where decoding does


@dataclass(frozen=True)
class Endings:
    """A row ends at a token of ``eos``, or where its text holds a string of ``stop``."""

    eos: Tensor
    stop: tuple[str, ...]
    tokenizer: Any

    def __call__(self, tokens: Tensor, rows: Tensor, step: int) -> Tensor:
        """bool [rows]: whether each of ``rows`` ends with column ``step`` of tokens [all rows, max_tokens]."""
        newest = tokens[rows, step]
        ended = newest == self.eos if len(self.eos) == 1 else torch.isin(newest, self.eos)
        if not self.stop:
            return ended
        tails = texts(self.tokenizer, tokens[rows, max(0, step + 1 - window(self.stop)) : step + 1].tolist())
        return ended | torch.tensor([any(text in tail for text in self.stop) for tail in tails], device=ended.device)


def window(stop: Sequence[str]) -> int:
    """In how many of the newest tokens any of these strings is found once its last token is there: a token is at least one byte."""
    return MARGIN + max(len(text.encode()) for text in stop)


def text_stops(stop: Sequence[str], tokenizer: Any) -> Callable[[list[int]], bool]:
    """Whether the newest of these tokens completes one of the strings, asked after each of a row."""
    if not stop:
        return lambda tokens: False
    last = window(stop)
    return lambda tokens: any(text in tail for tail in texts(tokenizer, [tokens[-last:]]) for text in stop)


def eos_of(configs: Iterable[Any], vocabulary: int, tokenizer: Any) -> list[int]:
    """Every token that ends a response: those that any of a model's configs names; the tokenizer's where none does."""
    found: set[int] = set()
    for config in configs:
        ids = getattr(config, "eos_token_id", None)
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    found = {token for token in found if 0 <= token < vocabulary}
    return sorted(found) or [token for token in [tokenizer.eos_token_id] if token is not None]
