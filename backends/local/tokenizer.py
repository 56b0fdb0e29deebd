"""The tokenizer of a model folder."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from rlflow.checkpoints.model_files import TOKENIZER, small_files
from rlflow.errors import PlanError
from rlflow.training import pretrained


@functools.lru_cache(maxsize=8)
def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a model folder. Runs no code from it and fetches nothing. Raises PlanError where there
    is none."""
    if not _files(folder):  # transformers would make up an empty one for some models
        raise _unusable(folder, "none of its files")
    try:
        return pretrained.read_tokenizer(folder)
    except PlanError:
        raise
    except Exception as error:  # whatever its files make of transformers
        raise _unusable(folder, str(error)) from error


def _unusable(folder: Path, problem: str) -> PlanError:
    return PlanError.of(
        "no-tokenizer",
        f"the model folder {folder} has no tokenizer that can be loaded",
        found=problem,
        expected="tokenizer.json and tokenizer_config.json",
        remedy="save the tokenizer beside the model: tokenizer.save_pretrained(folder)",
    )


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files, byte by byte, where ``source`` has any and can be read: a model is worth
    more than what is beside it."""
    for path in _files(source) if source.resolve() != target.resolve() else ():
        try:
            data = path.read_bytes()
        except OSError:
            continue
        (target / path.name).write_bytes(data)


def _files(folder: Path) -> list[Path]:
    try:
        return small_files(folder, TOKENIZER)
    except OSError:
        return []
