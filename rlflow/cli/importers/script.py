"""Read the arguments of a trainer's command from a shell script, with variables filled in."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from rlflow.errors import PlanError, listed

ENDS = {"|", "||", "&", "&&", ";", ">", ">>", "2>&1", "&>"}  # words that end a command
SET = re.compile(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*|\"[^\"\n]*\"|'[^'\n]*')\s*(?:#.*)?$")
NAMED = re.compile(r"\$(?:\{(\w{1,100})(?::-([^}]{0,1000}))?\}|(\w{1,100}))")
CONSTANTS = {"true": True, "false": False, "null": None, "none": None}
LONGEST = 1 << 16  # maximum number of characters in a script without comments; shlex is slow above this
ROOM = 1 << 20  # maximum number of characters in all substituted variables together
DIGITS = 64  # maximum number of characters in a string that is read as a number


def arguments(text: str, programs: Sequence[str], name: str) -> list[str] | None:
    """Return the arguments that a script passes to one of ``programs``, with variables filled in.

    Returns None if the script doesn't start any of them. A comment inside the command doesn't end it.
    ``name``: the script's name in messages. Raises PlanError if the script is truncated, is too long, or
    starts several trainers.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    body = re.sub(r"\\\s*(#.*)?\n", " ", "\n".join(lines) + "\n")
    if len(body) > LONGEST:
        raise PlanError.of(
            "import",
            f"'{name}' is too long",
            found=f"{len(body)} characters without comments",
            expected=f"at most {LONGEST}",
            remedy="keep only the trainer's command and the variables that it uses",
        )
    variables = Variables(name)
    for line in lines:
        if match := SET.match(line):
            variables.values[match[1]] = variables.placed(match[2].strip("\"'"))
    words = [variables.placed(word) for word in _words(body, programs, name)]
    starts = [place for place, word in enumerate(words) if any(_is(word, program) for program in programs)]
    if len(starts) > 1:
        raise PlanError.of(
            "import",
            f"'{name}' starts {len(starts)} trainers",
            found=listed(words[place] for place in starts),
            expected="one command",
            remedy="keep one of them in a separate script",
        )
    if not starts:
        return None
    rest = words[starts[0] + 1 :]
    end = next((place for place, word in enumerate(rest) if word in ENDS), len(rest))
    if end == len(rest) and text.rstrip().endswith("\\"):
        raise PlanError.of(
            "import",
            f"'{name}' ends within the command that starts the trainer",
            found=lines[-1].strip()[-60:],
            expected="a last line without \\",
            remedy="name the complete script, or remove the last \\",
        )
    return [word for word in rest[:end] if word not in ("$@", "...", "")]


def _words(body: str, programs: Sequence[str], name: str) -> list[str]:
    try:
        return shlex.split(body.replace("\n", " ; "))
    except ValueError:  # an apostrophe in a line outside the command
        return [word for line in body.splitlines() for word in (*_of_line(line, programs, name), ";")]


def _of_line(line: str, programs: Sequence[str], name: str) -> list[str]:
    try:
        return shlex.split(line)
    except ValueError as error:
        words = [word.strip("\"'") for word in line.split()]
        if any(_is(word, program) for word in words for program in programs):
            raise PlanError.of(
                "import",
                f"'{name}' has a quote that is not closed in the command that starts the trainer",
                found=line[-60:],
                expected="quotes in pairs",
                remedy="close it; write a value with a line break on one line",
            ) from error
        return words


def _is(word: str, program: str) -> bool:
    """Whether a word of a command is the program, as a module name or as the path of the module's file."""
    return word == program or word.endswith(f"/{program.rpartition('.')[2]}.py")


class Variables:
    """The variables that a script sets.

    Values can contain other variables and grow quickly, so the total length of all values is limited.
    """

    def __init__(self, name: str) -> None:
        self.name, self.values, self.left = name, {"HOME": os.path.expanduser("~")}, ROOM

    def placed(self, text: str) -> str:
        """Fill in the variables in a string, using the given defaults for unknown ones.

        Raises PlanError if the result would be too long.
        """
        return NAMED.sub(self._value, text)

    def _value(self, match: re.Match[str]) -> str:
        value = self.values.get(match[1] or match[3], match[2] if match[2] is not None else match[0])
        self.left -= len(value)
        if self.left < 0:
            raise PlanError.of(
                "import",
                f"the variables of '{self.name}' expand to more than {ROOM} characters",
                found=match[0],
                expected="variables with short values",
                remedy=f"replace {match[0]} by its value",
            )
        return value


def unresolved(value: Any) -> bool:
    """Whether a value depends on more than the file: a variable, a command's output, or Hydra's ``???``."""
    if isinstance(value, list):
        return any(map(unresolved, value))
    return isinstance(value, str) and (value == "???" or re.search(r"\$[A-Za-z_{(]|`", value) is not None)


def once(pairs: Iterable[tuple[str, Any]], name: str) -> dict[str, Any]:
    """Return settings by key. Raises PlanError if a key is given twice with different values.

    ``name``: the file's name in messages.
    """
    settings: dict[str, Any] = {}
    for key, value in pairs:
        if key in settings and settings[key] != value:
            raise PlanError.of(
                "import",
                f"'{name}' gives {key} twice",
                found=f"{settings[key]!s:.60} and {value!s:.60}",
                expected="one value",
                remedy="keep the last one, which the project uses",
            )
        settings[key] = value
    return settings


def value(text: Any) -> Any:
    """Parse a string as a number, true, false, None, or a list of these in brackets.

    Any other string or value is returned unchanged.
    """
    if not isinstance(text, str):
        return text
    bare = text.strip().strip("\"'")
    if bare.startswith("[") and bare.endswith("]"):
        return [_scalar(part.strip().strip("\"'")) for part in bare[1:-1].split(",") if part.strip()]
    return _scalar(bare)


def _scalar(bare: str) -> Any:
    if bare.lower() in CONSTANTS:
        return CONSTANTS[bare.lower()]
    for number in (int, float) if len(bare) <= DIGITS else ():
        try:
            return number(bare)
        except ValueError:
            continue
    return bare
