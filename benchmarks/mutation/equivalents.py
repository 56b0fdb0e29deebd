"""Mutants that no test can kill, as equivalents.toml lists them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from mutants import Mutant


def equivalents() -> list[dict[str, str]]:
    """Those that are listed, each with the reason."""
    listed: list[dict[str, str]] = tomllib.loads(
        Path(__file__).with_name("equivalents.toml").read_text()
    ).get("equivalent", [])
    return listed


def reason(known: list[dict[str, str]], path: Path, mutant: Mutant, source: str) -> str:
    """Why no test can kill a mutant of a file with this text; empty where one may. Where the change alone
    could be several, the listed one has the text of its line."""
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
