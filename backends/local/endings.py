"""When a row ends."""

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

# tokens decoded before the place where a stop string can begin, so that it never begins where decoding does
MARGIN = 8


@dataclass(frozen=True)
class Endings:
    """Where sampled rows end."""

    eos: Tensor  # int64 [n]: tokens at which a row ends
    stop: tuple[str, ...]  # strings: a row ends where its text holds one
    tokenizer: Any
    min_tokens: int = 0  # the first tokens of a row, at which it does not end
    # whether special tokens are no part of a row's text, but where a stop string has them itself
    bare: bool = False
    # int64 [rows]: each row ends after as many tokens, and nowhere else; None: as above
    lengths: Tensor | None = None

    @property
    def reach(self) -> int:
        """How many tokens before a new one have a say in whether it ends its row."""
        return window(self.stop) - 1 if self.stop else 0

    def __call__(self, tokens: Tensor, new: int, before: int = 0) -> Tensor:
        """int64 [rows]: which of the last ``new`` tokens of ``seen`` int64 [rows, reach and new] ends each
        row, ``new`` where none does. At the beginning of a response there may be fewer than ``reach`` tokens
        before the new ones, of which a response has ``before``."""
        newest = tokens[:, tokens.shape[1] - new :]
        hits = newest == self.eos if len(self.eos) == 1 else torch.isin(newest, self.eos)
        hits[:, : max(0, self.min_tokens - before)] = False
        at = torch.where(hits.any(1), hits.byte().argmax(1), new)
        return self._stopped(tokens, new, at, before - self.min_tokens) if self.stop else at

    @cached_property
    def _stops(self) -> Callable[[list[int], int], bool]:
        return text_stops(self.stop, self.tokenizer, self.bare)

    def _stopped(self, tokens: Tensor, new: int, at: Tensor, free: int) -> Tensor:
        """The ends of rows with ``stop`` strings too, where these come before ``at``. free: tokens before the
        new ones that may end a row."""
        first, stops = tokens.shape[1] - new + 1, self._stops
        rows = zip(tokens.tolist(), at.tolist(), strict=True)
        ends = [
            next((n for n in range(max(0, -free), end) if stops(row[: first + n], free + n + 1)), end)
            for row, end in rows
        ]
        return torch.tensor(ends, dtype=torch.int64)


def window(stop: Sequence[str]) -> int:
    """How many of the newest tokens hold any of these strings once its last token is there: a token is at
    least one byte."""
    return MARGIN + max(len(text.encode()) for text in stop)


def text_stops(stop: Sequence[str], tokenizer: Any, bare: bool = False) -> Callable[[list[int], int], bool]:
    """A function of the last tokens of a row and of how many of them are new (``free``): whether a new token
    completes one of the strings. A special token in a string matches its id only; the same letters in other
    tokens do not. bare: strings without special tokens are searched in the text without special tokens."""
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
    """Whether the text of the tail has the string, completed by one of the ``free`` newest tokens, with
    special tokens ``ids`` (place in the string → id) where it has them."""
    (text,) = texts(tokenizer, [tail], bare)
    # what is complete within it ends no row
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
    """Place → id of the special tokens in a text; of two that begin alike the longer one is there."""
    ids = {name: number for number, name in special.items() if name and name in text}
    pattern = "|".join(re.escape(name) for name in sorted(ids, key=len, reverse=True))
    return {found.start(): ids[found[0]] for found in re.finditer(pattern, text)} if pattern else {}


def ends_of_call(eos: Sequence[int], sampling: Sampling, vocabulary: int) -> list[int]:
    """Every token that ends a row of a call: those of the model, and those that the call names. Raises
    PlanError for one that the model cannot sample."""
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
    """Every token that ends a response: those of ``spec``, or, where it has none, those that any of the
    model's configs or its tokenizer names. Raises PlanError where none of them can be sampled: no response
    would ever end."""
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
    """The end tokens that a config or a tokenizer names."""
    ids = getattr(config, "eos_token_id", None)
    return (ids,) if isinstance(ids, int) else ids or ()
