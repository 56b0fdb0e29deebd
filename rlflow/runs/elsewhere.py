"""A run whose folder does not take its state: it is saved in another one, since without it what was learnt
would be lost."""

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
    """The files that say what the run is."""
    known = {identity.FILE: context.inputs.identity.encode()} if context.inputs else {}
    return known | directory.texts(context.settings, context.plan.graph)


def save_lost(loop: Loop, lost: Lost) -> PlanError:
    """Save a run whose folder is gone: where that is now, or in a new folder in its place. What became of it,
    as the error of the run."""
    context = loop.context
    try:
        folder = lost.moved or _anew(context, lost.folder.parent, lost.folder.name)
        with Writer(folder, context.options.keep) as writer:
            loop.writer = writer
            loop.save(loop.done, context.prompts.state())
        where = (
            f"it is saved as {writer.saved}"
            if writer.saved
            else f"it could not be saved there: {writer.failures[-1]}"
        )
        remedy = f"rlflow resume {folder}" if writer.saved else "start the run again"
        _note_state(context, folder, loop.done, str(lost))
    except (OSError, PlanError) as error:
        where, remedy = f"it could not be saved anew: {error}", "start the run again"
    return PlanError.of(
        "run-folder-lost",
        str(lost),
        found=where,
        expected="a folder that stays until the run ends",
        remedy=remedy,
    )


def save_beside(loop: Loop, folder: Path, why: str) -> Path | None:
    """Save the newest whole iteration of a run whose folder does not take it in the first place that does:
    beside the folder, or in the system's folder for temporary files or the user's own, which may be of
    another disk. The new run folder; None if no place takes it, or the models are between two iterations no
    more. ``why``: why the run's own does not take it."""
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
    with contextlib.suppress(OSError):  # there is no folder for temporary files
        places.append(Path(tempfile.gettempdir()))
    with contextlib.suppress(RuntimeError):  # there is no home
        places.append(Path.home())
    yield from dict.fromkeys(place for place in places if os.access(place, os.W_OK))


def _anew(context: RunContext, parent: Path, name: str) -> Path:
    """A folder of this name, or of a free one where something else has that. Raises PlanError."""
    flow, files = context.plan.graph.name, texts(context)
    try:
        return directory.create(parent, name, flow, files)
    except PlanError:
        return directory.create(parent, None, flow, files)


def _note_state(context: RunContext, folder: Path, iteration: int, error: str) -> None:
    """Write into a folder that a run stands there and has not ended well. Raises OSError."""
    begun = status.begun(context.plan.graph.name, context.options.iterations)
    status.write(folder, replace(begun, state="failed", iteration=iteration, error=error))
