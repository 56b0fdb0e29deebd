"""Add the line of the ``--config`` file to errors about settings that the file sets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from rlflow.config.flags import ALIASES
from rlflow.errors import Place, Problem

TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]")
KEY = re.compile(r"\s*([\w.\"'#-]+)\s*=")


def located(problems: Iterable[Problem], words: Sequence[str]) -> tuple[Problem, ...]:
    """Return the problems, with the line of the ``--config`` file added where the file sets the setting.

    ``words``: the words of the command. A setting that is also given as a flag gets no line, because the flag
    overrides the file.
    """
    flags = [word.removeprefix("--").partition("=")[0].replace("-", "_") for word in words]
    there = places(_file(words))
    return tuple(
        problem if problem.setting in flags else _with(problem, _place(there, problem.setting))
        for problem in problems
    )


def _with(problem: Problem, place: Place | None) -> Problem:
    """Set a problem's place, or its second place (``definition``) if it already has one."""
    if problem.place is None:
        return replace(problem, place=place)
    return replace(problem, definition=problem.definition or place)


def places(path: Path | None) -> dict[str, Place]:
    """Return the line of each setting in a TOML file, by name, or {} if the file can't be read."""
    try:
        text = path.read_text("utf-8") if path is not None else ""
    except (OSError, ValueError):
        return {}
    found: dict[str, Place] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := TABLE.match(line):
            table = f"{header[1]}."
        elif key := KEY.match(line):
            name = re.sub(r"[\"'\s]", "", table + key[1]).replace("-", "_")
            found.setdefault(ALIASES.get(name, name), Place(str(path), number))
    return found


def _file(words: Sequence[str]) -> Path | None:
    separate = [value for flag, value in pairwise(words) if flag == "--config"]
    joined = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    return Path((separate + joined)[0]) if separate + joined else None


def _place(there: dict[str, Place], setting: str) -> Place | None:
    """Return the line that sets a setting, or the line of the inline table around it."""
    while setting and setting not in there:
        setting = setting.rpartition(".")[0]
    return there.get(setting)
