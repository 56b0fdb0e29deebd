"""Secrets kept out of settings, logs and trackers: values under telling names, and values of the environment's telling variables."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
# parts of a name; not 'tokens', which here counts tokens: max_tokens, prompt_tokens
TELLING = {"token", "secret", "secrets", "key", "keys", "apikey", "apikeys", "password", "passwords", "passwd", "passphrase", "credentials"}
SHORTEST = 6  # a shorter value would be found by chance in innocent text
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
ADDRESS = re.compile(r"(://[^/\s:@]*:)[^/\s@]+@")  # scheme://user:password@host


def telling(name: str) -> bool:
    """Whether what bears this name is a secret: one of its parts (of snake_case, kebab-case, dotted.name or camelCase) says so."""
    return any(part.lower() in TELLING for part in PARTS.findall(name))


def redacted(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping with secrets masked, at every depth. Short numbers, booleans and None stay: --hp.key_dim is none."""
    return {masked(str(key)): MASK if telling(str(key)) and _hides(value) else _cleaned(value) for key, value in mapping.items()}


def masked(text: str) -> str:
    """The text without the values of telling environment variables and without passwords in addresses."""
    for value in _environment():
        text = text.replace(value, MASK)
    return ADDRESS.sub(rf"\1{MASK}@", text)


def _environment() -> list[str]:
    """Longest first, so that no rest of a longer value is left where a shorter one is part of it."""
    values = {value for name, value in os.environ.items() if telling(name) and len(value) >= SHORTEST}
    return sorted(values, key=len, reverse=True)


def _hides(value: Any) -> bool:
    if value is None or isinstance(value, bool | float):
        return False
    return len(str(value)) >= SHORTEST if isinstance(value, int) else bool(value)


def _cleaned(value: Any) -> Any:
    if isinstance(value, Mapping):
        return redacted(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_cleaned(item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return MASK if isinstance(value, int) and str(value) in _environment() else value
    return masked(value if isinstance(value, str) else str(value))
