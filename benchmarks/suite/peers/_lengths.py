"""Responses of recorded lengths for systems that sample with transformers' ``generate``."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList


class Lengths(LogitsProcessor):  # type: ignore[misc]
    """Each row of a call of ``generate`` has as many tokens as a list says: none that ends it before, and one
    that does as its last.

    lengths: int64 [rows]; ends: the tokens that end a response, of which the first is sampled; width: tokens
    of a padded prompt."""

    def __init__(self, lengths: Tensor, ends: list[int], width: int) -> None:
        self.lengths, self.ends, self.width = lengths, ends, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """``scores`` [rows, vocabulary] without the ends, or with one of them alone."""
        last = self.lengths.to(scores.device) - 1 <= input_ids.shape[1] - self.width
        scores = scores.index_fill(1, torch.tensor(self.ends, device=scores.device), -torch.inf)
        scores[last] = -torch.inf
        scores[last, self.ends[0]] = 0.0
        return scores


class Recorded:
    """A recorded list, of which each call of ``generate`` takes as many lengths as it has rows, from where
    the one before ended."""

    def __init__(self, file: str, ends: list[int]) -> None:
        self.list, self.ends, self.rows = json.loads(Path(file).read_text())["lengths"], ends, 0

    def take(self, rows: int) -> Tensor:
        """int64 [rows]: the next lengths; the list begins again where it ends."""
        lengths = [self.list[(self.rows + row) % len(self.list)] for row in range(rows)]
        self.rows += rows
        return torch.tensor(lengths)

    def processors(self, lengths: Tensor, width: int) -> LogitsProcessorList:
        """Logits processors for one call of `generate`: its rows get ``lengths``, behind prompts that are
        padded to ``width``."""
        return LogitsProcessorList([Lengths(lengths, self.ends, width)])


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a response: the tokenizer's first, then those that the model's generation config
    names."""
    ends = model.generation_config.eos_token_id
    return list(
        dict.fromkeys(
            [
                tokenizer.eos_token_id,
                *(ends if isinstance(ends, list) else [ends] if ends is not None else []),
            ]
        )
    )
