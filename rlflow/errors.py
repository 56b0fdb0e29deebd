"""The errors of rlflow, and who has to act on each.

    FlowError    the author of the algorithm, before anything runs
    PlanError    the user who chose the settings, the data or the placement
    StageError   the author of the stage, which raised while it ran; the original exception is its cause
    RunHeld      the user: another process uses the same run directory
    RemoteError  another process raised (the record is in ``failure``), or does not answer: Late, Dead

Every message names the place, the value found, the expected value, the nearest known name if there is one,
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

    The path is relative if the file is inside the working directory.
    """

    path: str
    line: int

    def __str__(self) -> str:
        relative = os.path.relpath(self.path)
        outside = not os.path.isabs(self.path) or relative.startswith("..")
        return f"{printable(self.path if outside else relative, keep='')}:{self.line}"


@dataclass(frozen=True)
class Problem:
    """One finding, as `rlflow check` and errors print it."""

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
        """Raise this error with all problems, if there are any."""
        if found := tuple(problems):
            raise cls(*found)

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)


class FlowError(_Reported):
    """The algorithm's source code has an error. Raised before anything runs."""


class PlanError(_Reported):
    """The settings, the data, the model or the placement of a run do not fit together, or cannot be used."""

    @classmethod
    def of(cls, code: str, message: str, **details: object) -> PlanError:
        """Return an error with a single ``Problem`` that has these fields."""
        return cls(Problem(code, message, **details))  # type: ignore[arg-type]

    def at(self, place: Place | None) -> PlanError:
        """Set ``place`` as the place of all problems that have none, and return this error."""
        self.problems = tuple(replace(problem, place=problem.place or place) for problem in self.problems)
        return self


class RunHeld(PlanError):
    """Another process uses the same run directory."""


@dataclass(eq=False)
class StageError(Exception):
    """A stage raised an error or did not finish by its deadline."""

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
    """An iteration has no rows to train on. The run continues with the next iteration."""

    account: object = None  # accounting of the rows that were sampled in the iteration


class Stopped(Exception):
    """An iteration was stopped on request before any weights changed. It can be repeated from its start."""


@dataclass(frozen=True)
class RemoteFailure:
    """The record of an error that another process raised. Prints in one line, with place, hint and callers."""

    type: str  # the name of the exception's class
    text: str
    # the last lines from the user's own files in the traceback; the line that raised comes first
    lines: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # notes for a full traceback, such as the traceback in the other process
    place: str = ""  # path:line of the user's line that raised; without one, of the line that raised
    hint: str = ""  # the flag that allows what the sandbox refused

    @property
    def message(self) -> str:
        """The error without its place, for a message that prints ``lines`` below."""
        return f"{self.type}: {self.text}"

    def add_notes_to(self, error: BaseException) -> None:
        """Add the notes to an error raised in this process, so that its traceback prints them."""
        for note in self.notes:
            error.add_note(note)

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        hint = f" ({self.hint})" if self.hint else ""
        callers = f"; called by {', '.join(self.lines[1:])}" if self.lines[1:] else ""
        return f"{place}{self.message}"[:MESSAGE] + hint + callers


# Why a row has no score, or why an episode failed: a sentence, or the record of an error.
Reason = str | RemoteFailure


class RemoteError(Exception):
    """Another process raised an error, or does not answer.

    The message names the error's type and the process. ``failure``: the record of the error, if one was
    raised there.
    """

    def __init__(self, text: str, failure: RemoteFailure | None = None) -> None:
        super().__init__(text)
        self.failure = failure
        if failure is not None:
            failure.add_notes_to(self)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines from the user's files in the traceback of the other process's error."""
        return self.failure.lines if self.failure is not None else ()


class Late(RemoteError):
    """Workers did not answer by the deadline of a call."""


class Dead(RemoteError):
    """A worker process ended, or was killed because it did not answer."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that was probably meant; None if no name is similar enough.

    The name with the fewest differences is chosen. A letter that is changed, missing, added or swapped counts
    as one difference. At most three differences are accepted, and at most a third of the longer name's
    length.
    """
    close = [(apart, each) for each in names if (apart := misspelt(name, each)) is not None]
    return min(close, key=lambda pair: pair[0])[1] if close else None


def misspelt(written: str, meant: str) -> int | None:
    """Return the number of letters in which two names differ; None if they differ too much for a misspelling.

    A letter that is changed, missing, added or swapped with its neighbour counts as one. Case is ignored, and
    ``-`` equals ``_``.
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
    """Return the text with control characters escaped, except those in ``keep``.

    Unescaped control characters in a file name or a sample could control the terminal.
    """
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def listed(names: Iterable[str], limit: int = 16) -> str:
    """Return names as comma-separated text for a message.

    At most ``limit`` names are listed. If some are omitted, their total number follows.
    """
    names = list(names)
    suffix = f", … ({len(names)} in all)" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + suffix
