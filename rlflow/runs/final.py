"""What a run leaves behind: a plain Hugging Face folder of each trained role, all of them at once, and the answers
of its evaluations, a line of JSON for each prompt, there whole or not at all."""

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
from rlflow.execution.engine import RoleModel
from rlflow.monitoring import status
from rlflow.runs.context import RunContext
from rlflow.runs.evaluate import KeepAnswers
from rlflow.runs.state import trained

FOLDER = "final"


def finished(folder: Path, iterations: int, roles: Mapping[str, RoleModel]) -> bool:
    """Whether a run said that so many iterations were all, which it does when its models are there."""
    try:
        record = status.read(folder)
    except ValueError:
        return False
    there = all((folder / FOLDER / role).is_dir() for role in roles)
    return record is not None and record.state == "done" and record.iterations == iterations and there


def write_models(context: RunContext, folder: Path) -> None:
    """``final/ROLE`` for each trained role: written aside, put on the disk, renamed, so that what is there is
    whole. Raises PlanError."""
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
            expected=f"room in {folder}",
            remedy="make room",
        ) from error


def _write(context: RunContext, role: str, model: RoleModel, folder: Path) -> None:
    """Write one model: what its trainer writes, and the tokenizer as it was when the run began. Raises
    OSError."""
    assert model.trainer is not None
    context.engine.keeper.settle(computing(role))
    model.trainer.save(folder)
    if not folder.is_dir():
        raise OSError(
            None, f"the process that trains '{role}' has another disk: it wrote nothing into this folder"
        )
    for name, data in context.files.get(role, {}).items() if (folder / CONFIG[0]).is_file() else ():
        if name != CONFIG[0]:  # the trainer wrote its own
            path = folder / name
            path.unlink(missing_ok=True)
            durable.write(path, [data])


ANSWERS = "evaluations"  # of a run, with a file for each evaluation


def name_of(iteration: int) -> str:
    """The file of the evaluation after so many iterations."""
    return f"{ANSWERS}/after-{iteration:06}.jsonl"


@contextlib.contextmanager
def answer_file(path: Path, failed: Callable[[OSError], object]) -> Iterator[KeepAnswers]:
    """While inside, take the answers to one prompt after another. The file is there when all of them are on
    the disk, and none where there are none. A disk that refuses them ends nothing: ``failed`` is told,
    once."""
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
    """A file that is written aside of its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None  # what ended the writing
        self._aside = durable.aside(path)
        self._file: int | None = None

    def add(self, answers: Mapping[str, Any]) -> None:
        """A line. Raises OSError."""
        if self._file is None:
            durable.make_folder(self.path.parent)
            self._file = os.open(self._aside, durable.NEW, 0o666)
        durable.write_all(
            self._file, memoryview(f"{json.dumps(answers)}\n".encode(errors="backslashreplace"))
        )

    def finish(self) -> None:
        """Put all lines on the disk, under the file's name. Raises OSError."""
        if self._file is not None:
            os.fsync(self._file)
            durable.move(self._aside, self.path)

    def discard(self) -> None:
        """Close the file, and remove what is not whole."""
        if self._file is not None:
            os.close(self._file)
            with contextlib.suppress(OSError):
                os.unlink(self._aside)
