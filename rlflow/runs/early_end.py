"""End a run early: save its state, and tell the user how to resume it.

If the run's folder can't store the state, it is saved elsewhere so that no training is lost.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from rlflow.checkpoints import durable
from rlflow.checkpoints.writer import Writer
from rlflow.errors import FlowError, PlanError, RemoteError, StageError, printable
from rlflow.execution.apply import ending
from rlflow.monitoring import status
from rlflow.monitoring.secrets import masked
from rlflow.processes.user_frames import whole
from rlflow.runs import directory, identity
from rlflow.runs.context import RunContext, RunStart
from rlflow.runs.directory import Lost, RunFolder, shown
from rlflow.runs.loop import Loop
from rlflow.runs.records import Records

BEGUN = RunStart()
NO_CHECKPOINT = "no checkpoint was written by this process"
TRACEBACK = "traceback.txt"  # file with the traceback of the exception that ended the run


@dataclass(frozen=True)
class EarlyEnd:
    """Saves what it can of a run that ends before its last iteration, and says how to resume it."""

    run_folder: RunFolder
    start: RunStart
    records: Records
    writer: Writer
    loop: Loop
    note: Callable[[str], object]

    def stopped(self, at_once: bool = False) -> str:
        """Return the message for a run that was stopped on request. ``at_once``: as for ``how_to_go_on``."""
        how = "stopped at once" if at_once else "stopped"
        return f"{how}; {self.how_to_go_on(at_once) or NO_CHECKPOINT}"

    def failure(self, raised: BaseException) -> BaseException:
        """Save the newest state of a run that fails, and return the error to end it with.

        The error says how to resume the run. If a worker failed outside any stage, for example in an
        evaluation or a save, its error becomes a StageError.
        """
        self.loop.rescue()
        engine = self.loop.context.engine
        if not isinstance(raised, Exception):  # such as a SystemExit that a backend raises
            return _failure(RemoteError(ending(raised)), engine.iteration, self.how_to_go_on(), self.note)
        then = [write_traceback(raised, self.records, self.run_folder), self.how_to_go_on()]
        return _failure(raised, engine.iteration, "\n".join(filter(None, then)), self.note)

    def how_to_go_on(self, at_once: bool = False) -> str:
        """Return the command that resumes the run, and a description of any state that is lost.

        Returns "" if nothing was saved and nothing is lost. ``at_once``: don't try to save anything else.
        """
        self.writer.wait(600.0)
        unsaved, place = self.unsaved() if self.writer.missed and not at_once else (self.loop.lost, None)
        parts = [unsaved] if unsaved else []
        if place is not None:
            parts.append(f"to continue: rlflow resume {shown(place)}")
        elif self.writer.saved is not None:
            parts.append(
                f"saved as {self.writer.saved.name}; to continue: rlflow resume {self.run_folder.shown}"
            )
        elif self.start is not BEGUN:
            parts.append(f"nothing new was saved; to continue: rlflow resume {self.run_folder.shown}")
        elif unsaved:
            parts.append("no checkpoint is left: start the run again")
        return "; ".join(parts)

    def unsaved(self) -> tuple[str, Path | None]:
        """Try to save the newest state in another folder, because the run's folder couldn't store it.

        Returns a text that says why and where, and the new run folder, or None in its place if the state is
        lost.
        """
        place = save_elsewhere(self.loop, self.run_folder.path, self.writer.missed)
        where = (
            f"it is saved in {shown(place)}"
            if place is not None
            else "no other folder could store it, so it is lost"
        )
        return f"the newest state could not be saved: {self.writer.missed}; {where}", place


def _failure(raised: Exception, iteration: int, then: str, note: Callable[[str], object]) -> Exception:
    """Return the error that ends the run, with the text ``then`` added.

    If the error has no place for the text, it is passed to ``note``. If a worker failed outside any stage,
    for example in an evaluation or a save, its error becomes a StageError.
    """
    failure = (
        StageError("", iteration, 0, str(raised), lines=raised.lines)
        if isinstance(raised, RemoteError)
        else raised
    )
    if isinstance(failure, StageError):
        failure.then = then
    elif isinstance(failure, PlanError) and then:
        *others, last = failure.problems
        return PlanError(*others, replace(last, remedy="; ".join(filter(None, (last.remedy, then)))))
    elif then:
        note(then)
    return failure


def write_traceback(raised: Exception, records: Records, run_folder: RunFolder) -> str:
    """Write an exception's full traceback to the run's folder, and return a line that says where it is.

    If the error's message already says everything, nothing is written and the line is "".
    """
    if isinstance(raised, FlowError | PlanError) or (
        isinstance(raised, StageError) and raised.__cause__ is None
    ):
        return ""  # its message is complete
    records.whole(TRACEBACK, printable(masked(whole(raised))).encode())
    return f"full traceback: {Path(run_folder.shown) / TRACEBACK}"


def texts(context: RunContext) -> dict[str, bytes]:
    """Return the files that describe a run, as name → content."""
    known = {identity.FILE: context.inputs.identity.encode()} if context.inputs else {}
    return known | directory.texts(context.settings, context.plan.graph)


def save_lost(loop: Loop, lost: Lost) -> PlanError:
    """Save the state of a run whose folder was moved or deleted, and return the error that ends the run.

    The state goes to the moved folder or, if the folder was deleted, to a new one with the old path. The
    error says where.
    """
    context = loop.context
    try:
        folder = lost.moved or _anew(context, lost.folder.parent, lost.folder.name)
        with Writer(folder, context.options.keep) as writer:
            loop.writer = writer
            loop.save(loop.done, context.prompts.state())
        where = (
            f"the state is saved as {writer.saved}"
            if writer.saved
            else f"the state could not be saved there: {writer.failures[-1]}"
        )
        remedy = f"rlflow resume {folder}" if writer.saved else "start the run again"
        _note_state(context, folder, loop.done, str(lost))
    except (OSError, PlanError) as error:
        where, remedy = f"the state could not be saved elsewhere: {error}", "start the run again"
    return PlanError.of(
        "run-folder-lost",
        str(lost),
        found=where,
        expected="a folder that stays in place until the run ends",
        remedy=remedy,
    )


def save_elsewhere(loop: Loop, folder: Path, why: str) -> Path | None:
    """Save the newest complete iteration in a new run folder, and return that folder.

    It is created next to ``folder`` or else in the system's temporary folder or the user's home, which may be
    on other disks. Returns None if none of them works, or if the models are in the middle of an iteration.
    ``why``: why the run's own folder failed, for the status.
    """
    for parent in _places(folder):
        with contextlib.suppress(OSError, PlanError):
            place = _anew(loop.context, parent, f"{folder.name}-saved")
            with Writer(place, on_failure=lambda failure: None) as writer:
                loop.writer = writer
                loop.rescue(again=True)
            if writer.saved is not None:
                _note_state(loop.context, place, loop.taken, why)
                return place
            durable.delete(place)
    return None


def _places(folder: Path) -> Iterator[Path]:
    places = [folder.parent]
    with contextlib.suppress(OSError):  # no temporary folder
        places.append(Path(tempfile.gettempdir()))
    with contextlib.suppress(RuntimeError):  # no home folder
        places.append(Path.home())
    yield from dict.fromkeys(place for place in places if os.access(place, os.W_OK))


def _anew(context: RunContext, parent: Path, name: str) -> Path:
    """Create a run folder with this name, or a free one if it is taken. Raises PlanError."""
    flow, files = context.plan.graph.name, texts(context)
    try:
        return directory.create(parent, name, flow, files)
    except PlanError:
        return directory.create(parent, None, flow, files)


def _note_state(context: RunContext, folder: Path, iteration: int, error: str) -> None:
    """Write a status that says that the run in ``folder`` has failed. Raises OSError."""
    begun = status.begun(context.plan.graph.name, context.options.iterations)
    status.write(folder, replace(begun, state="failed", iteration=iteration, error=error))
