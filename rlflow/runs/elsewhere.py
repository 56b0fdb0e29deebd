"""Save a run in another folder if its own folder cannot store its state, so that the training is not lost."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rlflow.checkpoints import durable
from rlflow.checkpoints.writer import Writer
from rlflow.errors import PlanError
from rlflow.monitoring import status
from rlflow.runs import directory, identity
from rlflow.runs.context import RunContext
from rlflow.runs.directory import Lost
from rlflow.runs.loop import Loop


def texts(context: RunContext) -> dict[str, bytes]:
    """Return the files that describe a run, as name → content."""
    known = {identity.FILE: context.inputs.identity.encode()} if context.inputs else {}
    return known | directory.texts(context.settings, context.plan.graph)


def save_lost(loop: Loop, lost: Lost) -> PlanError:
    """Save a run whose folder is gone.

    If the folder was moved, the state is saved there; if it was deleted, in a new folder at the same place.
    Returns the error that ends the run and names the place of the saved state.
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
    """Save the newest complete iteration in another folder, if the run's folder cannot store it.

    The parent folder is tried first, then the system's temporary folder and the user's home, which may be on
    another disk. Returns the new run folder; None if no folder works, or if the models are in the middle of
    an iteration. ``why``: why the run's own folder failed.
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
    """Create a folder with this name, or with a free name if this one is taken. Raises PlanError."""
    flow, files = context.plan.graph.name, texts(context)
    try:
        return directory.create(parent, name, flow, files)
    except PlanError:
        return directory.create(parent, None, flow, files)


def _note_state(context: RunContext, folder: Path, iteration: int, error: str) -> None:
    """Write a status that marks the folder's run as failed. Raises OSError."""
    begun = status.begun(context.plan.graph.name, context.options.iterations)
    status.write(folder, replace(begun, state="failed", iteration=iteration, error=error))
