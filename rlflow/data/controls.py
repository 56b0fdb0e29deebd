"""Keeps control tokens out of text that comes from users, tools, web pages or other models.

Such text is encoded with ordinary tokens only. It decodes to the same text, but it can't begin or end a turn.
Before a chat template renders it, any control token written in it is replaced with a placeholder character.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError
from rlflow.training import pretrained

# Private-use code points, which ordinary text does not contain.
PRIVATE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True)
class StandIns:
    """Placeholder characters that stand for control tokens."""

    texts: Mapping[str, str] = field(default_factory=dict)  # character → text

    def within(self, text: str) -> bool:
        """True if a string contains a placeholder, as a character or as its JSON escape."""
        return bool(self.texts) and self._pattern.search(text) is not None

    def resolved(self, text: str) -> str:
        """Replace each placeholder in a string with the text of its control token."""
        return self._pattern.sub(lambda found: self._written[found[0]], text) if self.texts else text

    @cached_property
    def _written(self) -> dict[str, str]:
        return dict(self.texts) | {
            json.dumps(mark)[1:-1]: json.dumps(text)[1:-1] for mark, text in self.texts.items()
        }

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._written)))


class Controls:
    """The control tokens of a tokenizer.

    These are its special tokens, and those of its added tokens that occur in ``template``, its chat template.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        self.tokenizer = tokenizer
        named = {
            str(token): number
            for token, number in zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        }
        added = {
            str(token): number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special or str(token) in template
        }
        self.ids = {text: int(number) for text, number in {**named, **added}.items() if text.strip()}
        self.numbers = frozenset(self.ids.values())
        self._flags = {
            str(token): (token.lstrip, token.rstrip) for token in tokenizer.added_tokens_decoder.values()
        }

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """A regular expression that finds control tokens in a string, preferring the longest."""
        return re.compile("|".join(map(re.escape, sorted(self.ids, key=len, reverse=True))) or r"(?!)")

    def hidden(self, content: Sequence[Any], others: Iterable[str] = ()) -> tuple[list[Any], StandIns]:
        """Replace each control token in strings or messages with a placeholder.

        Returns (the changed content, the placeholders). ``others``: other strings that a template writes;
        characters in them aren't used as placeholders.
        """
        texts = [*_texts(list(content))]
        found = dict.fromkeys(match for text in texts for match in self.pattern.findall(text))
        if not found:
            return list(content), StandIns()
        used = "\n".join([*texts, *others])
        free = (
            mark
            for mark in map(chr, itertools.chain(*PRIVATE))
            if mark not in used and json.dumps(mark)[1:-1] not in used
        )
        marks = dict(zip(found, free, strict=False))
        hidden = [
            _replaced(each, lambda text: self.pattern.sub(lambda match: marks[match[0]], text))
            for each in content
        ]
        return hidden, StandIns({mark: text for text, mark in marks.items()})

    def encoded(self, texts: Sequence[str], hidden: StandIns, encode: Encode) -> list[list[int]]:
        """Return the ids of each text that a template has rendered.

        Control tokens written by the template are encoded as such, and the text behind the placeholders in
        ``hidden`` with ordinary tokens. ``encode``: the tokenizer's own encoding, which recognizes all
        control tokens. Raises PlanError if the tokenizer has no ordinary tokens for a placeholder's text.
        """
        rows = encode(texts) if texts else []
        for place, text in enumerate(texts):
            written = len(self.pattern.findall(text))
            if hidden.within(text) or sum(token in self.numbers for token in rows[place]) > written:
                rows[place] = [token for ids in self._pieces(text, hidden, encode) for token in ids]
        return rows

    def _pieces(self, text: str, hidden: StandIns, encode: Encode) -> Iterator[list[int]]:
        """Yield the ids of a string, piece by piece.

        The only control tokens among them are those that the template wrote.
        """
        stretch = ""
        for piece, control in self._divided(text):
            if not control and (hidden.within(piece) or self.numbers.intersection(encode([piece])[0])):
                if stretch:
                    yield encode([stretch])[0]
                yield self._plain(hidden.resolved(piece))
                stretch = ""
            else:
                stretch += piece
        if stretch:
            yield encode([stretch])[0]

    def _divided(self, text: str) -> Iterator[tuple[str, bool]]:
        """Split a string at its control tokens, and yield (part, whether it is a control token).

        White space that a control token absorbs is part of it.
        """
        at = 0
        for match in self.pattern.finditer(text):
            left, right = self._flags.get(match[0], (False, False))
            start = at + len(text[at : match.start()].rstrip()) if left else match.start()
            end = len(text) - len(text[match.end() :].lstrip()) if right else match.end()
            if start > at:
                yield text[at:start], False
            yield text[max(start, at) : end], True
            at = end
        if at < len(text):
            yield text[at:], False

    def _plain(self, text: str) -> list[int]:
        """Encode a string with ordinary tokens only.

        Raises PlanError if the tokenizer has no ordinary tokens for it.
        """
        ids = self._without(text)
        if self.numbers.intersection(ids):
            raise PlanError.of(
                "control-tokens",
                "the tokenizer has no ordinary tokens for the text of a control token",
                found=repr(text[:80]),
                expected="a tokenizer with ordinary tokens for each character",
                remedy="use another model; or, to allow control tokens in environment messages, "
                "--env.control_tokens allow",
            )
        return ids

    @cached_property
    def _without(self) -> Callable[[str], list[int]]:
        """Return a function that encodes a string as if the tokenizer had no control tokens."""
        if not self.tokenizer.is_fast:
            return lambda text: list(
                self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            )
        return _inner(json.loads(self.tokenizer.backend_tokenizer.to_str()), self.numbers)


def unwritable(folder: Path) -> list[str]:
    """Return the control tokens of a model folder whose text can't be encoded with ordinary tokens.

    Only reads the folder's files, without loading the tokenizer in transformers. Empty if tokenizer.json is
    missing or unreadable.
    """
    state, templates = (
        pretrained.read_tokenizer_file(folder),
        "".join(pretrained.read_templates(folder).values()),
    )
    named = {text for text in pretrained.read_special_tokens(folder).values() if text}
    try:
        ids = {
            token["content"]: int(token["id"])
            for token in state["added_tokens"]
            if token["special"] or token["content"] in named or token["content"] in templates
        }
        ids |= {text: int(number) for text, number in _vocabulary(state).items() if text in named}
        encode, numbers = _inner(state, frozenset(ids.values())), frozenset(ids.values())
        return [text for text in ids if numbers.intersection(encode(text))]
    except Exception:  # the library may raise any error for malformed files
        return []


def _inner(state: dict[str, Any], numbers: frozenset[int]) -> Callable[[str], list[int]]:
    """Return an encoding function for a tokenizer without its added tokens ``numbers``.

    ``state``: the content of tokenizer.json.
    """
    from tokenizers import Tokenizer

    inner = Tokenizer.from_str(json.dumps(without(state, numbers)))
    return lambda text: list(inner.encode(text, add_special_tokens=False).ids)


def _vocabulary(state: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the base vocabulary's tokens, by text, without the added tokens."""
    vocabulary = state["model"]["vocab"]
    return (
        vocabulary
        if isinstance(vocabulary, dict)
        else {entry[0]: number for number, entry in enumerate(vocabulary)}
    )


def without(state: dict[str, Any], ids: Set[int]) -> dict[str, Any]:
    """Return a tokenizer's JSON, changed so that it doesn't recognize the added tokens ``ids`` in strings.

    All other tokens keep their ids.
    """
    known = _vocabulary(state)
    tokens = [
        token for token in state["added_tokens"] if token["id"] not in ids or token["content"] not in known
    ]
    renamed = [
        {**token, "content": f"{chr(PRIVATE[-1][-1])}{token['id']}"} if token["id"] in ids else token
        for token in tokens
    ]
    inside = {**state, "added_tokens": renamed, "post_processor": None, "truncation": None, "padding": None}
    return dict(_within(inside))


def _within(part: Any) -> Any:
    """Return a part of a tokenizer's JSON, changed so that strings don't get a space at their beginning."""
    if isinstance(part, dict):
        changed = {"prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else {}
        return {
            name: value if name in ("vocab", "merges") else _within(value) for name, value in part.items()
        } | changed
    return [_within(each) for each in part] if isinstance(part, list) else part


def _texts(content: Any) -> Iterator[str]:
    """Yield all strings in a nested value, including keys of mappings."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping | list | tuple):
        for each in itertools.chain(content, content.values()) if isinstance(content, Mapping) else content:
            yield from _texts(each)


def _replaced(content: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a nested value with ``change`` applied to each text in it."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, Mapping):
        return {change(str(name)): _replaced(value, change) for name, value in content.items()}
    return [_replaced(each, change) for each in content] if isinstance(content, list | tuple) else content
