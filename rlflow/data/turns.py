"""Encodes responses of several turns, with a mask.

The mask is True for tokens of the assistant's turns, and False for the tool or user messages in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlflow.author.messages import Message

if TYPE_CHECKING:
    from rlflow.data.encode import Encoder

Turn = tuple[list[int], bool]  # (token ids, True if the policy chose them)


def joined(turns: Sequence[Turn]) -> tuple[list[int], list[bool]]:
    """Join turns into one response, and return (token ids, mask)."""
    return [token for ids, _ in turns for token in ids], [by_policy for ids, by_policy in turns for _ in ids]


def answered(
    encoder: Encoder, exchanges: Sequence[tuple[str | list[Message], str | Sequence[Message]]]
) -> list[list[Turn]]:
    """Return the encoded turns of each response. A response that is a string is a single turn.

    ``exchanges``: pairs of (formatted prompt, response). Raises PlanError if a response can't be encoded.
    """
    alone = {
        place: (response, not isinstance(prompt, str))
        for place, (prompt, response) in enumerate(exchanges)
        if isinstance(response, str)
    }
    ids: dict[int, list[int]] = {}
    for chat in (False, True):
        texts = {place: text for place, (text, of_chat) in alone.items() if of_chat == chat}
        ids |= zip(texts, encoder.responses(list(texts.values()), chat), strict=True) if texts else ()
    return [
        [(ids[place], True)] if isinstance(response, str) else encoder.turns(prompt, response)
        for place, (prompt, response) in enumerate(exchanges)
    ]


def divided(messages: Sequence[Message]) -> list[tuple[list[Message], Message]]:
    """Split messages into turns, each as (messages before the assistant's message, that message)."""
    exchanges: list[tuple[list[Message], Message]] = []
    context: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            exchanges.append((context, message))
            context = []
        else:
            context.append(message)
    return exchanges
