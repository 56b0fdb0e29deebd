"""Load and copy a model folder's tokenizer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from rlflow.checkpoints.model_files import TOKENIZER, small_files
from rlflow.errors import PlanError
from rlflow.training import pretrained


@functools.lru_cache(maxsize=8)
def load_tokenizer(folder: Path) -> Any:
    """Load a model folder's tokenizer, without running code from the folder or downloading anything. Raises
    PlanError if there is no usable tokenizer."""
    if not _files(folder):  # transformers would make up an empty one for some models
        raise _unusable(folder, "none of its files")
    try:
        return pretrained.read_tokenizer(folder)
    except PlanError:
        raise
    except Exception as error:  # damaged files make transformers fail in any way
        raise _unusable(folder, str(error)) from error


def _unusable(folder: Path, problem: str) -> PlanError:
    return PlanError.of(
        "no-tokenizer",
        f"the model folder {folder} has no tokenizer that can be loaded",
        found=problem,
        expected="tokenizer.json and tokenizer_config.json",
        remedy="save the tokenizer next to the model: tokenizer.save_pretrained(folder)",
    )


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy the tokenizer's files from ``source`` to ``target`` byte for byte. Missing or unreadable files are
    skipped, so that saving a model never fails because of them."""
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
