"""Decodes responses to text, including the special tokens inside them.

Tokenizers mark some tokens as special: the ends of turns, but also ``<answer>`` or ``<think>`` if the model
was trained with them as special tokens. Padding and the end token of a response aren't part of the text.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return the text of each special token, by id."""
    added = {
        number: str(token)
        for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items()
        if token.special
    }
    return added | dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))


def texts(tokenizer: Any, rows: Iterable[Sequence[int]], bare: bool = False) -> list[str]:
    """Decode each row of token ids. ``bare``: True to leave out special tokens."""
    return [
        str(tokenizer.decode(list(row), skip_special_tokens=bare, clean_up_tokenization_spaces=False))
        for row in rows
    ]


def completions(
    tokenizer: Any, rows: Iterable[Sequence[int]], ends: Collection[int], bare: bool = False
) -> list[str]:
    """Decode each response, leaving out padding and the tokens in ``ends`` at its end.

    ``bare``: True to leave out all special tokens.
    """
    closing = {*ends, tokenizer.pad_token_id}
    return texts(tokenizer, (_open(row, closing) for row in rows), bare)


def _open(row: Sequence[int], closing: Collection[int | None]) -> Sequence[int]:
    """Return the row without any tokens of ``closing`` at its end."""
    length = len(row)
    while length and row[length - 1] in closing:
        length -= 1
    return row[:length]
