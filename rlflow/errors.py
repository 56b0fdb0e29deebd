"""The errors of rlflow, and who has to act on each.

    FlowError    the author of the algorithm, before anything runs
    PlanError    the user who chose the settings, the data or the placement
    StageError   the author of the stage, which failed while it ran; the original exception is its cause
    RunHeld      the user, because another process is using the same run directory
    RemoteError  it depends: another process raised an error (see ``failure``) or doesn't answer (Late, Dead)

Every message gives the place, the value found, the value expected, the nearest known name if there is one,
and the remedy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

Severity = Literal["error", "warning", "note"]
MESSAGE = 2000  # maximum number of characters in another process's error in a message


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, printed as ``path:line``.

    Inside the working directory, the path is printed as a relative path.
    """

    path: str
    line: int

    def __str__(self) -> str:
        relative = os.path.relpath(self.path)
        outside = not os.path.isabs(self.path) or relative.startswith("..")
        return f"{printable(self.path if outside else relative, keep='')}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """Something wrong with a flow or a run, as `rlflow check` and errors print it."""

    code: str  # stable name for the kind of mistake
    message: str
    place: Place | None = None  # the location of the mistake
    definition: Place | None = None  # the definition of the object with the mistake
    found: str = ""
    expected: str = ""
    nearest: str | None = None  # the known name that was probably meant
    remedy: str = ""  # what to write or do instead
    variant: str = ""  # the setting with which the mistake appears
    severity: Severity = "error"
    setting: str = ""  # the setting that is wrong, without dashes, such as actor.lr

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        level = "" if self.severity == "error" else f"{self.severity}: "
        under = f"with {self.variant}, " if self.variant else ""
        lines = [f"{place}{level}{under}{self.message}"]
        details = {"defined": self.definition, "found": self.found, "expected": self.expected}
        details |= {"nearest": self.nearest, "remedy": self.remedy}
        lines += [f"  {name + ':':<10}{value}" for name, value in details.items() if value]
        return printable("\n".join(lines))


class _Reported(Exception):
    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    @classmethod
    def refuse(cls, problems: Iterable[Problem]) -> None:
        """Raise this error if there are any problems."""
        if found := tuple(problems):
            raise cls(*found)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class FlowError(_Reported):
    """The source code of the algorithm is wrong. Raised before anything runs."""


class PlanError(_Reported):
    """A run's settings, data, model or placement don't fit together, or can't be used."""

    @classmethod
    def of(cls, code: str, message: str, **details: object) -> PlanError:
        """Return an error with a single ``Problem``, which gets these fields."""
        return cls(Problem(code, message, **details))  # type: ignore[arg-type]

    def at(self, place: Place | None) -> PlanError:
        """Set the place of all problems that don't have one, and return this error."""
        self.problems = tuple(replace(problem, place=problem.place or place) for problem in self.problems)
        return self


class RunHeld(PlanError):
    """Another process is using the same run directory."""


@dataclass(eq=False)
class StageError(Exception):
    """A stage failed, or didn't finish before its deadline."""

    stage: str  # empty if the run failed between two stages
    iteration: int
    rows: int  # rows in the call
    message: str
    place: Place | None = None  # place of the call in the flow
    columns: Mapping[str, str] = field(default_factory=dict)  # input → its padded shape
    then: str = ""  # which part of the run is saved, and how to continue it
    # the last lines from the user's own files in the traceback; the line that raised comes first
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        failure = (
            f"stage '{self.stage}' failed in iteration {self.iteration} on {self.rows} rows"
            if self.stage
            else (f"the run failed between stages, in iteration {self.iteration}")
        )
        lines = [f"{place}{failure}: {printable(self.message)}"]
        lines += [
            f"  {'raised by' if not n else 'called by'} {printable(line)}"
            for n, line in enumerate(self.lines)
        ]
        lines += [f"  {name}: {shape}" for name, shape in self.columns.items()]
        return "\n".join([*lines, *([printable(self.then)] if self.then else [])])


class SkipIteration(Exception):
    """An iteration has no rows to train on. The run goes on to the next one."""

    account: object = None  # accounting of the rows that were sampled in the iteration


class Stopped(Exception):
    """An iteration was stopped on request before any weights changed. It can be repeated from its start."""


@dataclass(frozen=True)
class RemoteFailure:
    """The record of an error that another process raised.

    ``str`` returns it as one line, with its place, hint and callers.
    """

    type: str  # the name of the exception's class
    text: str
    # the last lines from the user's own files in the traceback; the line that raised comes first
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # notes for a full traceback, such as the traceback in the other process
    place: str = ""  # path:line of the user's line that raised; without one, of the line that raised
    hint: str = ""  # the flag that allows what the sandbox refused

    @property
    def message(self) -> str:
        """The error without its place, for messages that print ``lines`` separately."""
        return f"{self.type}: {self.text}"

    def add_notes_to(self, error: BaseException) -> None:
        """Add the notes to an error raised in this process, so that they appear in its traceback."""
        for note in self.notes:
            error.add_note(note)

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        hint = f" ({self.hint})" if self.hint else ""
        callers = f"; called by {', '.join(self.lines[1:])}" if self.lines[1:] else ""
        return f"{place}{self.message}"[:MESSAGE] + hint + callers


# Why a row has no score or an episode failed: a sentence, or the record of an error.
Reason = str | RemoteFailure


class RemoteError(Exception):
    """Another process raised an error or isn't answering.

    The message names the process and the type of the error. ``failure``: the record of the error, if one was
    raised.
    """

    def __init__(self, text: str, failure: RemoteFailure | None = None) -> None:
        super().__init__(text)
        self.failure = failure
        if failure is not None:
            failure.add_notes_to(self)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of the user's files in the traceback of the other process's error."""
        return self.failure.lines if self.failure is not None else ()


class Late(RemoteError):
    """Workers didn't answer a call in time."""


class Dead(RemoteError):
    """A worker process ended, or was killed because it didn't answer."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that was probably meant, or None if no name is close enough.

    This is the name with the fewest differences: letters that are changed, missing, added or swapped. There
    can be at most three, and at most one for every three letters of the longer name.
    """
    close = [(apart, each) for each in names if (apart := misspelt(name, each)) is not None]
    return min(close, key=lambda pair: pair[0])[1] if close else None


def misspelt(written: str, meant: str) -> int | None:
    """Return how many letters differ between two names, or None if there are too many for a misspelling.

    A letter that is changed, missing, added or swapped with its neighbour counts as one. Case is ignored, and
    ``-`` is the same as ``_``.
    """
    first, second = (text.casefold().replace("-", "_") for text in (written, meant))
    most = min(max(len(first), len(second)) // 3, 3)
    if abs(len(first) - len(second)) > most:
        return None
    before: list[int] = []
    row = list(range(len(second) + 1))
    for i, letter in enumerate(first, 1):
        before, last, row = row, before, [i]
        for j, other in enumerate(second, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other)))
            if i > 1 and j > 1 and (letter, first[i - 2]) == (second[j - 2], other):
                row[j] = min(row[j], last[j - 2] + 1)
    return row[-1] if row[-1] <= most else None


def printable(text: str, keep: str = "\n\t") -> str:
    """Escape the control characters in a text, except those in ``keep``.

    Otherwise, those in a file name or a sample could control the terminal.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def listed(names: Iterable[str], limit: int = 16) -> str:
    """Join names with commas for a message.

    If there are more than ``limit``, the rest are left out and the total number is added.
    """
    names = list(names)
    suffix = f", … ({len(names)} in all)" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + suffix
