"""What a model said, as text: the tokens of a response, with the special tokens that are inside it.

A special token is one that a tokenizer marks as such: an end of a turn, and just as well ``<answer>`` or
``<think>`` where a model was given them so. The end of a response and padding are no part of what was said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """The text of each special token, by its id."""
    added = {
        number: str(token)
        for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if token.special
    }
    return added | dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))


def texts(tokenizer: Any, rows: Iterable[Sequence[int]], bare: bool = False) -> list[str]:
    """The text of each row of token ids. bare: without special tokens."""
    return [
        str(tokenizer.decode(list(row), skip_special_tokens=bare, clean_up_tokenization_spaces=False))
        for row in rows
    ]


def completions(
    tokenizer: Any, rows: Iterable[Sequence[int]], ends: Collection[int], bare: bool = False
) -> list[str]:
    """The text of each response: its token ids without the padding and those of ``ends`` that it closes with.
    bare: as of ``texts``."""
    closing = {*ends, tokenizer.pad_token_id}
    return texts(tokenizer, (_open(row, closing) for row in rows), bare)


def _open(row: Sequence[int], closing: Collection[int | None]) -> Sequence[int]:
    """The row without the tokens of ``closing`` that stand at its end."""
    length = len(row)
    while length and row[length - 1] in closing:
        length -= 1
    return row[:length]
