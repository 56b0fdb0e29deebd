"""The results of a run: its trained models as Hugging Face folders, and answers of evaluations as JSON.

A folder or file appears complete or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from rlflow.checkpoints import durable
from rlflow.checkpoints.model_files import CONFIG
from rlflow.compiler.residency_schedule import computing
from rlflow.errors import PlanError
from rlflow.execution.role_model import RoleModel
from rlflow.monitoring import status
from rlflow.runs.context import RunContext
from rlflow.runs.evaluate import KeepAnswers
from rlflow.runs.state import trained

FOLDER = "final"


def finished(folder: Path, iterations: int, roles: Mapping[str, RoleModel]) -> bool:
    """True if a run has recorded that it finished after ``iterations`` iterations, and its models exist."""
    try:
        record = status.read(folder)
    except ValueError:
        return False
    there = all((folder / FOLDER / role).is_dir() for role in roles)
    return record is not None and record.state == "done" and record.iterations == iterations and there


def write_models(context: RunContext, folder: Path) -> None:
    """Write a folder ``final/ROLE`` for each trained role.

    The folder is written under a temporary name, flushed to disk and renamed, so it is always complete.
    Raises PlanError if it cannot be written.
    """
    roles = trained(context)
    if not roles:
        return
    aside = durable.aside(folder / FOLDER)
    try:
        os.mkdir(aside)
        try:
            for role, model in roles.items():
                _write(context, role, model, aside / role)
            durable.take_place(aside, folder / FOLDER)
        finally:
            if os.path.lexists(aside):
                durable.delete(aside)
    except (OSError, SafetensorError) as error:
        raise PlanError.of(
            "final-model",
            "the trained models cannot be written",
            found=str(getattr(error, "strerror", None) or error),
            expected=f"free space in {folder}",
            remedy="free space",
        ) from error


def _write(context: RunContext, role: str, model: RoleModel, folder: Path) -> None:
    """Write one model: the files of its trainer, and the tokenizer that the run started with.

    Raises OSError.
    """
    assert model.trainer is not None
    context.engine.offloads.settle(computing(role))
    model.trainer.save(folder)
    if not folder.is_dir():
        raise OSError(
            None,
            f"the process that trains '{role}' does not share this disk: it wrote nothing to this folder",
        )
    for name, data in context.files.get(role, {}).items() if (folder / CONFIG[0]).is_file() else ():
        if name != CONFIG[0]:  # the trainer wrote this file
            path = folder / name
            path.unlink(missing_ok=True)
            durable.write(path, [data])


ANSWERS = "evaluations"  # folder in a run's folder, with a file for each evaluation


def name_of(iteration: int) -> str:
    """Return the file name for the evaluation after ``iteration`` iterations."""
    return f"{ANSWERS}/after-{iteration:06}.jsonl"


@contextlib.contextmanager
def answer_file(path: Path, failed: Callable[[OSError], object]) -> Iterator[KeepAnswers]:
    """Return a context that writes the answers to each prompt to the file ``path``.

    The context's value is a function that is called with the answers to one prompt. The file appears when all
    answers are on disk; without answers it does not appear. A write error does not end the run: ``failed`` is
    called once with the error.
    """
    file = _Lines(path)

    def attempt(action: Callable[[], object]) -> None:
        if file.error is None:
            try:
                action()
            except OSError as error:
                file.error = error
                failed(error)

    try:
        yield lambda answers: attempt(lambda: file.add(answers))
        attempt(file.finish)
    finally:
        file.discard()


class _Lines:
    """A file that is written under a temporary name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None  # the error that ended the writing
        self._aside = durable.aside(path)
        self._file: int | None = None

    def add(self, answers: Mapping[str, Any]) -> None:
        """Add a line. Raises OSError."""
        if self._file is None:
            durable.make_folder(self.path.parent)
            self._file = os.open(self._aside, durable.NEW, 0o666)
        durable.write_all(
            self._file, memoryview(f"{json.dumps(answers)}\n".encode(errors="backslashreplace"))
        )

    def finish(self) -> None:
        """Flush all lines to disk and give the file its name. Raises OSError."""
        if self._file is not None:
            os.fsync(self._file)
            durable.move(self._aside, self.path)

    def discard(self) -> None:
        """Close the file, and remove it if it is incomplete."""
        if self._file is not None:
            os.close(self._file)
            with contextlib.suppress(OSError):
                os.unlink(self._aside)
