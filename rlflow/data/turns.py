"""Responses of several turns. Tokens of the assistant's turns are in the mask; tokens of messages between them, of a tool or a user, are
not."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.messages import Message

Turn = tuple[list[int], bool]  # token ids, and whether the policy chose them


def joined(turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    """(token ids, mask) of all turns together, one entry for each token."""
    return [token for ids, _ in turns for token in ids], [by_policy for ids, by_policy in turns for _ in ids]


def divided(messages: Sequence[Message]) -> list[tuple[list[Message], str]]:
    """Divide messages into turns. For each message of the assistant: (messages since the assistant's one before, its text)."""
    exchanges: list[tuple[list[Message], str]] = []
    context: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            exchanges.append((context, message["content"]))
            context = []
        else:
            context.append(message)
    return exchanges
