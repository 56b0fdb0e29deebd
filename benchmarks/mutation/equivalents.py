"""Mutants that no test can kill, listed in equivalents.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

from mutants import Mutant


def equivalents() -> list[dict[str, str]]:
    """Return the entries of equivalents.toml: mutants that no test can kill, each with the reason."""
    listed: list[dict[str, str]] = tomllib.loads(
        Path(__file__).with_name("equivalents.toml").read_text()
    ).get("equivalent", [])
    return listed


def reason(known: list[dict[str, str]], path: Path, mutant: Mutant, source: str) -> str:
    """Return the listed reason why no test can kill a mutant; empty if the mutant is not listed.

    ``known``: the entries of equivalents.toml. ``source``: text of the mutant's file. An entry may contain
    the text of its line, which distinguishes the mutant from the same change elsewhere.
    """
    line = source.splitlines()[mutant.line - 1]
    return next(
        (
            one["why"]
            for one in known
            if (one["file"], one["before"], one["after"]) == (str(path), mutant.before, mutant.after)
            and one.get("line", line.strip()) == line.strip()
        ),
        "",
    )
