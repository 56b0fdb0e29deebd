"""Parses the data sources that a user names: ``[NAME=]FILE[:WEIGHT]``.

FILE is a file, a folder, a reasoning-gym task, or a data set on the Hub.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from glob import has_magic
from pathlib import Path

from rlflow.data.gym import PREFIX
from rlflow.data.hub_names import hub_data
from rlflow.data.records import SUFFIXES
from rlflow.errors import PlanError

NAME = re.compile(r"\w[\w.-]*")


@dataclass(frozen=True)
class SourceSpec:
    """A data source as named by the user, not opened yet."""

    name: str  # name in metrics, and after the @ of a reward
    path: str  # the file, the folder, the task with its prefix as written, or the name on the Hub
    weight: Fraction | None = None  # None if the user gives no weight
    before: str = ""  # the user's text before the path
    after: str = ""  # the user's text after the path

    def at(self, path: str) -> str:
        """Return the user's text for this source with another path, but the same name and weight."""
        return f"{self.before}{path}{self.after}"


def parse_source(written: str) -> SourceSpec:
    """Parse a data source such as ``name=file.jsonl:2``.

    A string that is an existing path isn't split at = or a colon. Raises PlanError for an invalid weight.
    """
    body, weight = _split_weight(written)
    head, equals, path = body.partition("=")
    if not equals or not NAME.fullmatch(head) or _exists(body):
        return SourceSpec(_name(body), body, weight, "", written.removeprefix(body))
    path, weight = _split_weight(written.removeprefix(f"{head}="))
    return SourceSpec(head, path, weight, f"{head}=", written.removeprefix(f"{head}={path}"))


def parse_sources(written: Sequence[str]) -> tuple[SourceSpec, ...]:
    """Parse the sources of a run.

    Raises PlanError if two sources share a name, a name can't be used in metrics, or only some sources have a
    weight.
    """
    sources = tuple(map(parse_source, written))
    names = [source.name for source in sources]
    for source in sources if len(sources) > 1 else ():
        if names.count(source.name) > 1 or not NAME.fullmatch(source.name):
            twice = names.count(source.name) > 1
            raise PlanError.of(
                "source-name",
                f"two sources of data are called '{source.name}'"
                if twice
                else f"'{source.name}' is not a valid name for a source of data",
                found=", ".join(each.path for each in sources),
                expected="a different name for each source, of letters, digits, _, - and .",
                remedy=f"--data NAME={source.path}{source.after}",
            )
    lacking = [source for source in sources if source.weight is None]
    if 0 < len(lacking) < len(sources):
        raise PlanError.of(
            "source-weight",
            f"the source '{lacking[0].name}' has no weight, but other sources have one",
            found=f"--data {lacking[0].at(lacking[0].path)}",
            expected="a weight for each source, or for none",
            remedy=f"--data {lacking[0].at(lacking[0].path)}:1.0, or remove all weights: each source "
            "then counts by its number of records",
        )
    return sources


def _exists(path: str) -> bool:
    return os.path.exists(os.path.expanduser(path))


def _name(path: str) -> str:
    """Return the stem of a file, or the name of a folder, task or repository on the Hub."""
    if (name := hub_data(path)) is not None:
        return name.stem
    if has_magic(path) and not _exists(path):
        path = str(Path(path).parent.absolute())
    last = Path(path.removeprefix(PREFIX)).name
    return Path(last).stem if Path(last).suffix in SUFFIXES else last


def _split_weight(text: str) -> tuple[str, Fraction | None]:
    """Split a string such as ``file.jsonl:2`` into (text without the weight, weight or None)."""
    body, colon, last = text.rpartition(":")
    if not colon or f"{body}:" == PREFIX or _exists(text):
        return text, None
    try:
        weight = float(last)
    except ValueError:
        if _exists(body) or Path(body).suffix in SUFFIXES or body.startswith(PREFIX):
            raise _no_weight(body, last) from None
        return text, None
    if not math.isfinite(weight) or weight <= 0:
        raise _no_weight(body, last)
    return body, Fraction(last)


def _no_weight(body: str, text: str) -> PlanError:
    return PlanError.of(
        "source-weight",
        f"the weight of the data '{body}' is invalid",
        found=text or "nothing after the colon",
        expected="a number above 0",
        remedy=f"--data {body}:0.5, or remove the weights of all sources",
    )
