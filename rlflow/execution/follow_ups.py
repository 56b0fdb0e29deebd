"""The functions an engine uses to encode follow-up prompts and responses, and to decode tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rlflow.author.batch import Batch, Data
from rlflow.author.columns import TABLE, Kind, Level
from rlflow.author.messages import Message, as_text
from rlflow.execution.lineage import whole_completions

Roles = tuple[str, ...]

Asked = str | list[Message]  # text or messages of a follow-up prompt or a response
# token ids of a response with its end token, and for each whether the assistant wrote it
Reply = tuple[list[int], list[bool]]


def as_bytes(roles: Roles, texts: Sequence[Asked]) -> list[list[int]]:
    """Return the UTF-8 bytes of each text as token ids, for runs without a model. Ignores ``roles``."""
    return [list(as_text(text).encode()) for text in texts]


def bytes_after(roles: Roles, texts: Sequence[Asked], sampled: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the UTF-8 bytes of each text as token ids. Ignores ``roles`` and ``sampled``."""
    return as_bytes(roles, texts)


def text_of_bytes(roles: Roles, rows: Sequence[Sequence[int]], bare: bool = False) -> list[str]:
    """Return the text of each row of token ids that ``as_bytes`` returned. Ignores ``roles`` and ``bare``."""
    return [bytes(number % 256 for number in row).decode(errors="replace") for row in rows]


def replies_of_bytes(roles: Roles, texts: Sequence[Asked]) -> list[Reply]:
    """Return the UTF-8 bytes of each text as the token ids of a response, with its mask. Ignores ``roles``."""
    return [(ids, [True] * len(ids)) for ids in as_bytes(roles, texts)]


@dataclass(frozen=True)
class Asking:
    """Encodes follow-up prompts and responses, and decodes tokens with the tokenizers of given roles."""

    encode: Callable[[Roles, Sequence[Asked]], list[list[int]]] = as_bytes  # token ids of strings
    # token ids of a next user turn after sampled ids
    follow: Callable[[Roles, Sequence[Asked], Sequence[Sequence[int]]], list[list[int]]] = bytes_after
    # token ids of an environment message after sampled ids; a plain string is appended unchanged
    speak: Callable[[Roles, Sequence[Asked], Sequence[Sequence[int]]], list[list[int]]] = bytes_after
    # responses with these texts, for roles that are trained on them
    reply: Callable[[Roles, Sequence[Asked]], list[Reply]] = replies_of_bytes
    # (roles, token ids, bare): strings; ``bare`` drops special tokens
    decode: Callable[..., list[str]] = text_of_bytes
    # tool calls in token ids, as ``rlflow.author.messages.ToolCall``
    calls: Callable[[Roles, Sequence[Sequence[int]]], list[list[Any]]] = lambda roles, rows: [
        [] for _ in rows
    ]
    longest: float = math.inf  # maximum number of tokens in a follow-up prompt
    longest_row: float = math.inf  # maximum number of tokens in a prompt with an encoded response


def encoded_prompts(asking: Asking, batch: Batch, roles: Roles) -> Batch:
    """Make a follow-up prompt of each row's ``text``: the columns ``prompt`` and ``prompt_tokens``.

    If the rows have responses, the text is appended to the row's prompt and response.
    """
    sampled = batch.data["tokens"].lists() if "tokens" in batch else None
    texts = batch["text"]
    ids = asking.encode(roles, texts) if sampled is None else asking.follow(roles, texts, sampled)
    if sampled is not None:
        before = zip(batch.data["prompt_tokens"].lists(), sampled, strict=True)
        ids = [[*prompt, *response, *more] for (prompt, response), more in zip(before, ids, strict=True)]
    flat = torch.tensor([token for row in ids for token in row], dtype=torch.int64)
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    tokens = Data(Kind(Level.PROMPT, "int64"), flat, lengths)
    prompt = replace(batch.data["text"], value=tuple(map(as_text, texts)))
    return Batch(batch.axis, {"prompt": prompt, "prompt_tokens": tokens})


def encoded_responses(asking: Asking, batch: Batch, roles: Roles) -> Batch:
    """Make a response of each row's ``text``: all columns that `encode` gives, except ``group``.

    A response to an empty text has no tokens. If the row's prompt ends with the beginning of a response, this
    is part of ``completion``.
    """
    texts = batch["text"]
    written = [text for text in texts if text]
    replies = iter(asking.reply(roles, written) if written else ())
    rows: list[Reply] = [next(replies) if text else ([], []) for text in texts]
    lengths = torch.tensor([len(ids) for ids, _ in rows], dtype=torch.int64)

    def per_token(name: str, values: list[Any], dtype: torch.dtype) -> Data:
        return Data(TABLE[name].kind, torch.tensor(values, dtype=dtype), lengths)

    tokens = per_token("tokens", [token for ids, _ in rows for token in ids], torch.int64)
    encoded = Batch(
        batch.axis,
        {
            "tokens": tokens,
            "mask": per_token("mask", [own for _, mask in rows for own in mask], torch.bool),
            "completion": replace(batch.data["text"], value=tuple(map(as_text, texts))),
            "finish": Data(TABLE["finish"].kind, ("stop",) * len(batch)),
            "temperature": Data(TABLE["temperature"].kind, torch.ones(len(batch))),
            "policy_version": replace(tokens, value=torch.full_like(tokens.value, -1)),
        },
    )
    if "prefix_length" not in batch:
        return encoded
    return whole_completions(partial(asking.decode, roles), batch, encoded)
