"""Describe the models of a run in one line each: where a model comes from, its dtype and its size."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path

from rich.filesize import decimal

from rlflow.checkpoints.model_files import weight_files
from rlflow.compiler.byte_sizes import ModelFacts
from rlflow.config.footprint import facts
from rlflow.config.roles.bound import Roles
from rlflow.data.hub_names import snapshot_of
from rlflow.errors import PlanError

UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "K"))  # of numbers of parameters


def model_lines(roles: Roles, rewards: Mapping[str, Path], dtype: str) -> Iterator[str]:
    """Yield a line for each folder from which a role or reward loads its model.

    ``rewards``: the folder of each reward, by name. ``dtype``: the dtype that the run computes in. Packaged
    models are left out, and so are folders that can't be read, because loading them will report the error.
    """
    readers: dict[Path, list[str]] = {}
    for name, folder in [*((name, role.folder) for name, role in roles.items()), *rewards.items()]:
        if folder is not None and not folder.is_relative_to(_packaged()):
            readers.setdefault(folder, []).append(name)
    for folder, names in readers.items():
        try:
            read = facts(folder)
        except PlanError:
            continue
        yield f"model of {', '.join(names)}: {_source(folder)}, {_size(folder, read)}, computed in {dtype}"


def _source(folder: Path) -> str:
    name = snapshot_of(folder)
    return f"{name.shown} of the Hub" if name else f"the local folder {os.path.relpath(folder)}"


def _size(folder: Path, read: ModelFacts) -> str:
    total = sum(path.stat().st_size for path in weight_files(folder))
    stored = read.config.get("dtype") or read.config.get("torch_dtype")
    return f"{_count(read.parameters)} parameters{f' in {stored}' if stored else ''} ({decimal(total)})"


def _count(number: int | None) -> str:
    if number is None:
        return "unknown"
    return next((f"{number / unit:.3g}{name}" for unit, name in UNITS if number >= unit), str(number))


def _packaged() -> Path:
    return Path(str(files("rlflow.data.tasks")))
