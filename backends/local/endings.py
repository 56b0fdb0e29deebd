"""When a row ends."""

from __future__ import annotations

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
        window = MARGIN + max(len(text.encode()) for text in self.stop)  # a token is at least one byte
        tails = texts(self.tokenizer, tokens[rows, max(0, step + 1 - window) : step + 1].tolist())
        return ended | torch.tensor([any(text in tail for text in self.stop) for tail in tails], device=ended.device)
