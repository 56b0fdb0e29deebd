"""Messages of a chat as a value of a text column: one string, so that columns of them travel and are saved as
other text is.

A message is a mapping with the text ``role`` and the text ``content``, and whatever else a chat template may
read of it: ``tool_calls``, ``name``, ``reasoning_content``, each a value that JSON has. Beside other keys the
content may be None or absent. In memory the type of the string, ``Packed``, tells messages from text. Where
strings are written as bytes a mark before messages does, and text that begins with the mark gets another one:
so nothing that data or a model say is ever taken for messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
# what messages begin with where they are written; the character separates records (ASCII)
MARK = "\x1emessages\x1e"
UNSOUND = re.compile("[\ud800-\udfff\0]")
# what is counted of a text that is changed for a model: characters that U+FFFD replaces, texts that are cut
CHANGES = ("replaced", "cut")
PLAIN = {"role", "content"}  # keys of a message that is nothing but text


class ToolCall(NamedTuple):
    """A call of a tool in what a model said."""

    name: str  # of the tool
    arguments: Mapping[str, Any]  # by name
    problem: str = ""  # why it is no call; empty for one


class Packed(str):
    """Messages as one string, as JSON: of each that is plain the pair of role and content, of any other the
    whole object."""

    __slots__ = ()


def is_messages(value: Any) -> bool:
    """Whether a value is one message or more."""
    return isinstance(value, list | tuple) and len(value) > 0 and not any(map(fault, value))


def fault(value: Any) -> str:
    """Why a value is no message, with the key that is wrong; empty for a message."""
    if not isinstance(value, Mapping):
        return f"{type(value).__name__} in place of a message"
    if not isinstance(value.get("role"), str):
        return f"its 'role' is {_named(value, 'role')}, not a text"
    if not isinstance(value.get("content"), str) and (
        value.get("content") is not None or value.keys() <= PLAIN
    ):
        return f"its 'content' is {_named(value, 'content')}, not a text"
    return next(
        (
            f"its '{key}' cannot be carried: {reason}"
            for key, item in value.items()
            if (reason := _beyond_json(key, item))
        ),
        "",
    )


def _named(value: Mapping[str, Any], key: str) -> str:
    return type(value[key]).__name__ if key in value else "missing"


def _beyond_json(key: Any, item: Any) -> str:
    """Why a template in another process cannot be given an entry of a message; empty where it can."""
    if not isinstance(key, str):
        return "the key is no text"
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"it is not valid Unicode: {error.reason}"
    except (TypeError, ValueError, RecursionError) as error:
        return f"{type(item).__name__}, of which there is no JSON: {error}"
    return ""


def mended(value: Any) -> tuple[Any, int]:
    """A text, or messages, with U+FFFD for each lone surrogate and NUL, in keys and nested values too, and
    how many these were. No tokenizer takes the former. Other values stay."""
    if isinstance(value, str):
        return UNSOUND.subn("\ufffd", value)
    if isinstance(value, Mapping):
        pairs = [(mended(key), mended(item)) for key, item in value.items()]
        return {key: item for (key, _), (item, _) in pairs}, sum(key[1] + item[1] for key, item in pairs)
    if isinstance(value, list | tuple):
        items = [mended(item) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    return value, 0


def is_plain(message: Message) -> bool:
    """Whether a message is nothing but a role and a text."""
    return set(message) == PLAIN and message["content"] is not None


def packed(messages: Sequence[Message]) -> Packed:
    """Messages as one string."""
    whole = [
        [message["role"], message["content"]] if is_plain(message) else dict(message) for message in messages
    ]
    return Packed(json.dumps(whole, ensure_ascii=False))


def unpacked(text: str) -> str | list[Message]:
    """The messages in a string that ``packed`` gave; any other text as it is."""
    if not isinstance(text, Packed):
        return text
    whole = json.loads(text)
    return [
        message if isinstance(message, dict) else dict(zip(("role", "content"), message, strict=True))
        for message in whole
    ]


def written(text: str) -> str:
    """A text, or messages, as a plain string, for ``read``."""
    return MARK + text if isinstance(text, Packed) or text.startswith(MARK) else text


def read(text: str) -> str:
    """A text, or messages, from a string that ``written`` gave. Raises ValueError for a string that it writes
    for nothing."""
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
    """A text as it is; messages joined, each under its role; one message alone as its text."""
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return text_of(content[0])
    return "\n\n".join(f"{message['role']}: {text_of(message)}" for message in content)


def text_of(message: Message) -> str:
    """The content of a message, and behind it whatever else it has but its role, as JSON."""
    more = {key: item for key, item in message.items() if key not in PLAIN}
    return " ".join(
        [*filter(None, [message.get("content")]), *([json.dumps(more, ensure_ascii=False)] if more else [])]
    )
