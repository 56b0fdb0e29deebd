"""What rlflow says when something is wrong, and to whom.

    FlowError    the author of the algorithm, before anything runs
    PlanError    whoever chose the settings, the data or the placement
    StageError   a stage raised while it ran; the original exception is its cause
    RunHeld      another process is running in the same directory

Every message names the place, what was found, what was expected, the nearest name where there is one, and what to write instead.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file. Prints as ``path:line``, relative to the working directory where it is inside."""

    path: str
    line: int

    def __str__(self) -> str:
        relative = os.path.relpath(self.path)
        outside = not os.path.isabs(self.path) or relative.startswith("..")
        return f"{printable(self.path if outside else relative, keep='')}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One finding. ``code`` is stable and names the kind of mistake; ``variant`` is the setting under which it shows."""

    code: str
    message: str
    place: Place | None = None
    definition: Place | None = None
    found: str = ""
    expected: str = ""
    nearest: str | None = None
    remedy: str = ""
    variant: str = ""
    severity: Severity = "error"

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        level = "" if self.severity == "error" else f"{self.severity}: "
        under = f"with {self.variant}, " if self.variant else ""
        lines = [f"{where}{level}{under}{self.message}"]
        details = {"defined": self.definition, "found": self.found, "expected": self.expected}
        details |= {"nearest": self.nearest, "remedy": self.remedy}
        lines += [f"  {name + ':':<10}{value}" for name, value in details.items() if value]
        return printable("\n".join(lines))


class _Reported(Exception):
    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class FlowError(_Reported):
    """The algorithm's text cannot be what its author meant."""


class PlanError(_Reported):
    """The settings, the data, the model or the placement of a run do not fit."""

    @classmethod
    def of(cls, code: str, message: str, **details: object) -> PlanError:
        return cls(Problem(code, message, **details))  # type: ignore[arg-type]


class RunHeld(PlanError):
    """A run directory is in use by another process."""


@dataclass(eq=False)
class StageError(Exception):
    """A stage raised, or passed its deadline. ``columns`` maps each input to its padded shape. Without a ``stage`` it was between two.
    ``lines``: the last lines of the user's files that the error went through, the one that raised first. ``then``: what of the run is
    saved, and how to go on."""

    stage: str
    iteration: int
    rows: int
    message: str
    place: Place | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    then: str = ""
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place else ""
        what = f"stage '{self.stage}' failed in iteration {self.iteration} on {self.rows} rows" if self.stage else (
            f"the run failed between stages, in iteration {self.iteration}")
        lines = [f"{where}{what}: {printable(self.message)}"]
        lines += [f"  {'raised by' if not n else 'called by'} {printable(line)}" for n, line in enumerate(self.lines)]
        lines += [f"  {name}: {shape}" for name, shape in self.columns.items()]
        return "\n".join([*lines, *([printable(self.then)] if self.then else [])])


class SkipIteration(Exception):
    """There is nothing to train on in this iteration. ``account``: what became of the rows that were sampled for it."""

    account: object = None


class Stopped(Exception):
    """The iteration was stopped on request before any weights changed: it can be run again as if it had not begun."""


class RemoteError(Exception):
    """What another process raised, or that it does not answer. The text says of which type, and where."""


class Late(RemoteError):
    """Ranks that have not answered by the deadline of a call."""


class Dead(RemoteError):
    """A worker is gone."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, or None."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1, cutoff=0.6)), None)


def printable(text: str, keep: str = "\n\t") -> str:
    """The text with control characters escaped: a file name or a sample must not drive a terminal."""
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def listed(names: Iterable[str], limit: int = 16) -> str:
    """Names for a message: comma-separated, cut after ``limit``."""
    names = list(names)
    more = f", … ({len(names)} in all)" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + more
