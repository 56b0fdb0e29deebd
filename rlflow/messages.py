"""Messages of a chat as a value of a text column: one string, so that columns of them travel and are saved as other text is.

A message is a mapping with the texts ``role`` and ``content``, and nothing else. In memory the type of the string, ``Packed``, tells
messages from text. Where strings are written as bytes a mark before messages does, and text that begins with the mark gets another one:
so nothing that data or a model say is ever taken for messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, str]
MARK = "\x1emessages\x1e"  # what messages begin with where they are written; the character separates records (ASCII)


class ToolCall(NamedTuple):
    """A call of a tool in what a model said."""

    name: str  # of the tool
    arguments: Mapping[str, Any]  # by name
    problem: str = ""  # why it is no call; empty for one


class Packed(str):
    """Messages as one string: pairs of role and content as JSON."""

    __slots__ = ()


def is_messages(value: Any) -> bool:
    """Whether a value is one message or more."""
    return isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_message, value))


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"role", "content"} and all(isinstance(text, str) for text in value.values())


def packed(messages: Sequence[Message]) -> Packed:
    """Messages as one string."""
    return Packed(json.dumps([[message["role"], message["content"]] for message in messages], ensure_ascii=False))


def unpacked(text: str) -> str | list[Message]:
    """The messages in a string that ``packed`` gave; any other text as it is."""
    if not isinstance(text, Packed):
        return text
    return [{"role": role, "content": content} for role, content in json.loads(text)]


def written(text: str) -> str:
    """A text, or messages, as a plain string, for ``read``."""
    return MARK + text if isinstance(text, Packed) or text.startswith(MARK) else text


def read(text: str) -> str:
    """A text, or messages, from a string that ``written`` gave. Raises ValueError for a string that it writes for nothing."""
    if not text.startswith(MARK):
        return text
    rest = text.removeprefix(MARK)
    return rest if rest.startswith(MARK) else _canonical(Packed(rest))


def _canonical(value: Packed) -> Packed:
    """The value, where ``packed`` gives it for some messages."""
    try:
        messages = unpacked(value)
    except (ValueError, TypeError, RecursionError):
        messages = []
    if not is_messages(messages) or packed(messages) != value:  # type: ignore[arg-type]
        raise ValueError(f"no messages after the mark of messages: {value[:40]!r}")
    return value


def as_text(content: str | Sequence[Message]) -> str:
    """A text as it is; messages joined, each under its role; one message alone as its content."""
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return content[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in content)
