"""Force responses to recorded lengths, in systems that sample with transformers' ``generate``."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList


class Lengths(LogitsProcessor):  # type: ignore[misc]
    """A logits processor that gives each row of a ``generate`` call a given length.

    It forbids end tokens before a row's last token, and forces an end token there. ``lengths``: int64 [rows].
    ``ends``: the end tokens; the first one is forced. ``width``: tokens in a padded prompt.
    """

    def __init__(self, lengths: Tensor, ends: list[int], width: int) -> None:
        self.lengths, self.ends, self.width = lengths, ends, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the changed ``scores`` [rows, vocabulary].

        A row at its last position can only get an end token. Other rows cannot get one.
        """
        last = self.lengths.to(scores.device) - 1 <= input_ids.shape[1] - self.width
        scores = scores.index_fill(1, torch.tensor(self.ends, device=scores.device), -torch.inf)
        scores[last] = -torch.inf
        scores[last, self.ends[0]] = 0.0
        return scores


class Recorded:
    """A recorded list of lengths. Each call of ``generate`` uses the next lengths in the list."""

    def __init__(self, file: str, ends: list[int]) -> None:
        self.list, self.ends, self.rows = json.loads(Path(file).read_text())["lengths"], ends, 0

    def take(self, rows: int) -> Tensor:
        """Return the next lengths, int64 [rows]. After the last length, the list starts again."""
        lengths = [self.list[(self.rows + row) % len(self.list)] for row in range(rows)]
        self.rows += rows
        return torch.tensor(lengths)

    def processors(self, lengths: Tensor, width: int) -> LogitsProcessorList:
        """Return the logits processors for a call of `generate` whose rows have these lengths.

        ``width``: tokens of a padded prompt.
        """
        return LogitsProcessorList([Lengths(lengths, self.ends, width)])


def ends_of(model: Any, tokenizer: Any) -> list[int]:
    """Return the end tokens: the tokenizer's, then those in the model's generation config."""
    ends = model.generation_config.eos_token_id
    return list(
        dict.fromkeys(
            [
                tokenizer.eos_token_id,
                *(ends if isinstance(ends, list) else [ends] if ends is not None else []),
            ]
        )
    )
