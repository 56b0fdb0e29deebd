"""The words of the command by which a shell script starts a trainer, and the values that its texts stand for."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "2>&1", "&>"}  # words after which another command begins
SET = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*|\"[^\"\n]*\"|'[^'\n]*')\s*(?:#.*)?$")
NAMED = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}


def arguments(text: str, programs: Sequence[str]) -> list[str] | None:
    """The words after the first of ``programs`` in a script, with the variables that it sets in their places; None where none is started.
    A comment within a command does not end it."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    variables = {"HOME": os.path.expanduser("~")}
    for line in lines:
        if match := SET.match(line):
            variables[match[1]] = expanded(match[2].strip("\"'"), variables)
    body = re.sub(r"\\\s*(#.*)?\n", " ", "\n".join(lines) + "\n").replace("\n", " ; ")
    words = [expanded(word, variables) for word in _words(body)]
    start = next((place for place, word in enumerate(words) if any(_is(word, program) for program in programs)), None)
    if start is None:
        return None
    rest = words[start + 1 :]
    end = next((place for place, word in enumerate(rest) if word in ENDS), len(rest))
    return [word for word in rest[:end] if word not in ("$@", "...", "")]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:  # an apostrophe in a line that is no part of the command
        return [word.strip("\"'") for word in text.split()]


def _is(word: str, program: str) -> bool:
    """Whether a word starts a program: its module, or the file of that module."""
    return word == program or word.endswith(f"/{program.rpartition('.')[2]}.py")


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """The text with variables replaced that are known or have a default."""
    return NAMED.sub(lambda match: variables.get(match[1] or match[3], match[2] if match[2] is not None else match[0]), text)


def value(text: Any) -> Any:
    """The value that a text stands for: a number, true, false, nothing, a list in brackets, or itself."""
    if not isinstance(text, str):
        return text
    bare = text.strip().strip("\"'")
    if bare.startswith("[") and bare.endswith("]"):
        return [value(part) for part in bare[1:-1].split(",") if part.strip()]
    if bare.lower() in CONSTANTS:
        return CONSTANTS[bare.lower()]
    for number in (int, float):
        try:
            return number(bare)
        except ValueError:
            continue
    return bare
