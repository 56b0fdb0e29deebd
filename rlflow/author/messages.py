"""Chat messages packed into a single string, so that text columns can hold and store them.

A message is a mapping with the strings ``role`` and ``content``. It can have other keys that a chat template
reads, such as ``tool_calls``, ``name`` or ``reasoning_content``, with any JSON value; its content may then be
None or absent.

In memory, messages have the type ``Packed``. In stored strings, they start with a prefix. Ordinary text that
happens to start with this prefix gets it a second time, so that text from the data or a model is never
mistaken for messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
# prefix of messages in written strings; the character separates records in ASCII
MARK = "\x1emessages\x1e"
UNSOUND = re.compile("[\ud800-\udfff\0]")
# names of the counts of changes to a model's text: characters replaced with U+FFFD, and strings that were cut
CHANGES = ("replaced", "cut")
PLAIN = {"role", "content"}  # keys of a message that has nothing but a role and a string as content


class ToolCall(NamedTuple):
    """A tool call written by a model."""

    name: str  # name of the tool
    arguments: Mapping[str, Any]  # argument name → value
    problem: str = ""  # why this is not a valid call; empty for a valid call


class Packed(str):
    """Messages as a JSON string.

    A message that consists of just a role and a string as its content is stored as the pair [role, content].
    Any other message is stored as an object.
    """

    __slots__ = ()


def is_messages(value: Any) -> bool:
    """Return True if the value is a non-empty list or tuple of messages."""
    return isinstance(value, list | tuple) and len(value) > 0 and not any(map(fault, value))


def fault(value: Any) -> str:
    """Say what is wrong with a message, naming the key. Returns an empty string if nothing is."""
    if not isinstance(value, Mapping):
        return f"{type(value).__name__} instead of a message"
    if not isinstance(value.get("role"), str):
        return f"its 'role' is {_named(value, 'role')}, expected a text"
    if not isinstance(value.get("content"), str) and (
        value.get("content") is not None or value.keys() <= PLAIN
    ):
        return f"its 'content' is {_named(value, 'content')}, expected a text"
    return next(
        (
            f"its '{key}' cannot be stored: {reason}"
            for key, item in value.items()
            if (reason := _beyond_json(key, item))
        ),
        "",
    )


def _named(value: Mapping[str, Any], key: str) -> str:
    return type(value[key]).__name__ if key in value else "missing"


def _beyond_json(key: Any, item: Any) -> str:
    """Say why an entry of a message can't be written as JSON. Returns an empty string if it can."""
    if not isinstance(key, str):
        return "the key is not a text"
    try:
        json.dumps(item, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        return f"it is not valid Unicode: {error.reason}"
    except (TypeError, ValueError, RecursionError) as error:
        return f"{type(item).__name__} has no JSON form: {error}"
    return ""


def without_invalid_characters(value: Any) -> tuple[Any, int]:
    """Replace lone surrogates, which tokenizers reject, and NULs with U+FFFD.

    ``value`` is a string or messages; in messages, keys and nested values are changed too. Anything else is
    returned as is. Returns the new value and the number of replacements.
    """
    if isinstance(value, str):
        return UNSOUND.subn("\ufffd", value)
    if isinstance(value, Mapping):
        pairs = [
            (without_invalid_characters(key), without_invalid_characters(item)) for key, item in value.items()
        ]
        return {key: item for (key, _), (item, _) in pairs}, sum(key[1] + item[1] for key, item in pairs)
    if isinstance(value, list | tuple):
        items = [without_invalid_characters(item) for item in value]
        return [item for item, _ in items], sum(count for _, count in items)
    return value, 0


def cut_to(value: Any, most: int) -> Any:
    """Shorten a string, or the content of the last of several messages, to ``most`` characters.

    If there is nothing to cut, or ``value`` is something else, the same object is returned.
    """
    if isinstance(value, str):
        return value[:most] if len(value) > most else value
    last = value[-1] if isinstance(value, list) and value else None
    content = last.get("content") if isinstance(last, Mapping) else None
    if not isinstance(last, Mapping) or not isinstance(content, str) or len(content) <= most:
        return value
    return [*value[:-1], {**last, "content": content[:most]}]


def is_plain(message: Message) -> bool:
    """Return True if the message consists of just a role and a string as its content."""
    return set(message) == PLAIN and message["content"] is not None


def packed(messages: Sequence[Message]) -> Packed:
    """Pack messages into a string."""
    whole = [
        [message["role"], message["content"]] if is_plain(message) else dict(message) for message in messages
    ]
    return Packed(json.dumps(whole, ensure_ascii=False))


def unpacked(text: str) -> str | list[Message]:
    """Undo ``packed``. Other text is returned as is."""
    if not isinstance(text, Packed):
        return text
    whole = json.loads(text)
    return [
        message if isinstance(message, dict) else dict(zip(("role", "content"), message, strict=True))
        for message in whole
    ]


def written(text: str) -> str:
    """Encode text or packed messages as a plain string for storage. ``read`` decodes it."""
    return MARK + text if isinstance(text, Packed) or text.startswith(MARK) else text


def read(text: str) -> str:
    """Decode a string that ``written`` made, into text or packed messages.

    Raises ValueError if ``written`` can't have made it.
    """
    if not text.startswith(MARK):
        return text
    rest = text.removeprefix(MARK)
    return rest if rest.startswith(MARK) else _canonical(Packed(rest))


def _canonical(value: Packed) -> Packed:
    """Return the value unchanged, or raise ValueError if ``packed`` can't have made it."""
    try:
        messages = unpacked(value)
    except (ValueError, TypeError, RecursionError):
        messages = []
    if not is_messages(messages) or packed(messages) != value:  # type: ignore[arg-type]
        raise ValueError(f"found no messages after the prefix of messages: {value[:40]!r}")
    return value


def as_text(content: str | Sequence[Message]) -> str:
    """Make text or messages readable.

    A string is returned as is. A single message gives its content. Several messages are joined, with each
    role in front.
    """
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return text_of(content[0])
    return "\n\n".join(f"{message['role']}: {text_of(message)}" for message in content)


def text_of(message: Message) -> str:
    """Return a message's content, followed by any keys other than the role as JSON."""
    more = {key: item for key, item in message.items() if key not in PLAIN}
    return " ".join(
        [*filter(None, [message.get("content")]), *([json.dumps(more, ensure_ascii=False)] if more else [])]
    )
