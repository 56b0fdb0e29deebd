"""Mutants that no test can kill, listed in equivalents.toml."""

from __future__ import annotations

import tomllib
from pathlib import Path

from mutants import Mutant


def equivalents() -> list[dict[str, str]]:
    """Return the listed mutants, each with its reason."""
    listed: list[dict[str, str]] = tomllib.loads(
        Path(__file__).with_name("equivalents.toml").read_text()
    ).get("equivalent", [])
    return listed


def reason(known: list[dict[str, str]], path: Path, mutant: Mutant, source: str) -> str:
    """Return the reason why no test can kill a mutant, as listed; empty if the mutant is not listed.

    ``source``: text of the mutant's file. An entry may contain the text of the line, to distinguish the
    mutant from the same change elsewhere.
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
