"""Find where sampled rows end: at an end token, at a stop string, or at a set length."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlflow.data.spoken import special_tokens, texts
from rlflow.errors import PlanError, listed
from rlflow.training.protocols import ModelSpec, Sampling

# tokens decoded before the first place of a stop string, because decoding may garble its first tokens
MARGIN = 8


@dataclass(frozen=True)
class Endings:
    """The rules for where sampled rows end."""

    eos: Tensor  # int64 [n]: tokens that end a row
    stop: tuple[str, ...]  # strings that end a row
    tokenizer: Any
    min_tokens: int = 0  # a row's first ``min_tokens`` tokens cannot end it
    # True if a row's text has no special tokens; stop strings with special tokens still match the tokens
    bare: bool = False
    # int64 [rows]: each row ends after exactly this many tokens; None: by eos and stop
    lengths: Tensor | None = None

    @property
    def reach(self) -> int:
        """How many tokens before a new token are needed to decide whether the row ends there."""
        return window(self.stop) - 1 if self.stop else 0

    def __call__(self, tokens: Tensor, new: int, before: int = 0) -> Tensor:
        """Return int64 [rows]: which of the ``new`` newest tokens ends each row, counted from 0, or ``new``
        if none does.

        tokens: int64 [rows, reach + new], the new tokens preceded by ``reach`` others, or fewer at the
        beginning of a response. before: how many tokens of the response come before the new ones.
        """
        newest = tokens[:, tokens.shape[1] - new :]
        hits = newest == self.eos if len(self.eos) == 1 else torch.isin(newest, self.eos)
        hits[:, : max(0, self.min_tokens - before)] = False
        at = torch.where(hits.any(1), hits.byte().argmax(1), new)
        return self._stopped(tokens, new, at, before - self.min_tokens) if self.stop else at

    @cached_property
    def _stops(self) -> Callable[[list[int], int], bool]:
        return text_stops(self.stop, self.tokenizer, self.bare)

    def _stopped(self, tokens: Tensor, new: int, at: Tensor, free: int) -> Tensor:
        """Replace the ends ``at`` with those of stop strings that are complete earlier. ``free`` is how many
        of the tokens before the new ones may end a row."""
        first, stops = tokens.shape[1] - new + 1, self._stops
        rows = zip(tokens.tolist(), at.tolist(), strict=True)
        ends = [
            next((n for n in range(max(0, -free), end) if stops(row[: first + n], free + n + 1)), end)
            for row, end in rows
        ]
        return torch.tensor(ends, dtype=torch.int64)


def window(stop: Sequence[str]) -> int:
    """Return how many of the newest tokens could contain a complete stop string. A token has at least one
    byte."""
    return MARGIN + max(len(text.encode()) for text in stop)


def text_stops(stop: Sequence[str], tokenizer: Any, bare: bool = False) -> Callable[[list[int], int], bool]:
    """Return a function ``stops(tokens, free)`` that tells whether one of the ``free`` newest tokens
    completes a stop string.

    A special token in a stop string matches only that token's id, not the same characters spelled by other
    tokens. bare: True to look for stop strings without special tokens in the text without special tokens.
    """
    if not stop:
        return lambda tokens, free: False
    last = window(stop)
    special = special_tokens(tokenizer)
    by_ids = {end: _special_within(end, special) for end in stop}

    def stops(tokens: list[int], free: int) -> bool:
        tail = tokens[-last:]
        return free > 0 and any(
            set(ids.values()) <= set(tail) and _completes(end, ids, tail, free, tokenizer, bare and not ids)
            for end, ids in by_ids.items()
        )

    return stops


def _completes(
    end: str, ids: Mapping[int, int], tail: list[int], free: int, tokenizer: Any, bare: bool
) -> bool:
    """Return True if one of the ``free`` newest tokens of ``tail`` completes the string ``end``.

    ids: the ids of special tokens in ``end``, by their position.
    """
    (text,) = texts(tokenizer, [tail], bare)
    # a string that was complete before the new tokens does not count
    known = len(texts(tokenizer, [tail[:-free]], bare)[0]) if free < len(tail) else 0
    wanted = set(ids.values())
    special = {
        len(texts(tokenizer, [tail[:place]])[0]): token for place, token in enumerate(tail) if token in wanted
    }
    starts = (
        found.start()
        for found in re.compile(f"(?={re.escape(end)})").finditer(
            text, max(0, known - len(end) + 1) if known else 0
        )
    )
    return any(all(special.get(start + place) == token for place, token in ids.items()) for start in starts)


def _special_within(text: str, special: Mapping[int, str]) -> dict[int, int]:
    """Return the ids of the special tokens in ``text``, by their position. If two match at the same position,
    the longer one wins."""
    ids = {name: number for number, name in special.items() if name and name in text}
    pattern = "|".join(re.escape(name) for name in sorted(ids, key=len, reverse=True))
    return {found.start(): ids[found[0]] for found in re.finditer(pattern, text)} if pattern else {}


def ends_of_call(eos: Sequence[int], sampling: Sampling, vocabulary: int) -> list[int]:
    """Return all tokens that end a row: the model's end tokens and the ``stop_token_ids`` of ``sampling``.
    Raises PlanError for a token that the model can't sample."""
    unknown = [token for token in sampling.stop_token_ids if token >= vocabulary]
    if unknown:
        raise PlanError.of(
            "stop-token",
            f"stop_token_ids are outside of the model's {vocabulary} tokens",
            found=listed(map(str, unknown)),
            expected=f"ids from 0 to {vocabulary - 1}",
            remedy="correct --ROLE.generate.stop_token_ids",
        )
    return (
        [*eos, *(token for token in sampling.stop_token_ids if token not in eos)]
        if not sampling.lengths
        else list(eos)
    )


def eos_of(spec: ModelSpec, configs: Iterable[Any], vocabulary: int, tokenizer: Any) -> list[int]:
    """Return the tokens that end a response: those in ``spec`` or, if it has none, those named by the model's
    configs and tokenizer.

    Raises PlanError if tokens are named but the model can't sample any of them, because no response would
    ever end.
    """
    named = set(spec.ends) or {token for config in (*configs, tokenizer) for token in _named(config)}
    sampled = sorted(token for token in named if 0 <= token < vocabulary)
    if named and not sampled:
        raise PlanError.of(
            "model-end",
            f"no response can end: eos_token_id is outside of the model's {vocabulary} tokens",
            found=listed(map(str, sorted(named))),
            expected=f"a token from 0 to {vocabulary - 1}",
            remedy="correct eos_token_id in config.json and generation_config.json of the model folder",
        )
    return sampled


def _named(config: Any) -> Iterable[int]:
    """Return the end tokens named by a config or tokenizer."""
    ids = getattr(config, "eos_token_id", None)
    return (ids,) if isinstance(ids, int) else ids or ()
