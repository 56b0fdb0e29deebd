"""Responses of several turns: the tokens of what the assistant says count, and what it is told in between (a tool's output, a user) is a
hole of the mask."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.data.fields import Message

Turn = tuple[list[int], bool]  # token ids, and whether the policy chose them


def joined(turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    """One row of tokens and its mask."""
    return [token for ids, _ in turns for token in ids], [chosen for ids, chosen in turns for _ in ids]


def divided(messages: Sequence[Message]) -> list[tuple[list[Message], str]]:
    """Each thing that the assistant says, and the messages since what it said before."""
    found: list[tuple[list[Message], str]] = []
    told: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            found.append((told, message["content"]))
            told = []
        else:
            told.append(message)
    return found
