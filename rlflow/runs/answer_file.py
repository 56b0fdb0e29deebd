"""The answers of an evaluation in a file of their own, a line of JSON for each prompt: there whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlflow.checkpoints import durable
from rlflow.runs.evaluate import KeepAnswers

ANSWERS = "evaluations"  # of a run, with a file for each evaluation


def name_of(iteration: int) -> str:
    """The file of the evaluation after so many iterations."""
    return f"{ANSWERS}/after-{iteration:06}.jsonl"


@contextlib.contextmanager
def answer_file(path: Path, failed: Callable[[OSError], object]) -> Iterator[KeepAnswers]:
    """While inside, take the answers to one prompt after another. The file is there when all of them are on the disk, and none where there
    are none. A disk that refuses them ends nothing: ``failed`` is told, once."""
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
        durable.write_all(self._file, memoryview(f"{json.dumps(answers)}\n".encode(errors="backslashreplace")))

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
