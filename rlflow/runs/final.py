"""The end of a run: a plain Hugging Face folder of each trained role, all of them at once, and whether a run has come to that end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError

from rlflow.checkpoints import durable
from rlflow.checkpoints.models import CONFIG
from rlflow.compiler.residency_schedule import computing
from rlflow.errors import PlanError
from rlflow.execution.engine import RoleModel
from rlflow.monitoring import status
from rlflow.runs.context import RunContext
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
    """``final/ROLE`` for each trained role: written aside, put on the disk, renamed, so that what is there is whole. Raises PlanError."""
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
        raise PlanError.of("final-model", "the trained models cannot be written", found=str(getattr(error, "strerror", None) or error),
                           expected=f"room in {folder}", remedy="make room") from error


def _write(context: RunContext, role: str, model: RoleModel, folder: Path) -> None:
    """Write one model: what its trainer writes, and the tokenizer as it was when the run began. Raises OSError."""
    assert model.trainer is not None
    context.engine.keeper.settle(computing(role))
    model.trainer.save(folder)
    if not folder.is_dir():
        raise OSError(None, f"the process that trains '{role}' has another disk: it wrote nothing into this folder")
    for name, data in context.files.get(role, {}).items() if (folder / CONFIG[0]).is_file() else ():
        if name != CONFIG[0]:  # the trainer wrote its own
            path = folder / name
            path.unlink(missing_ok=True)
            durable.write(path, [data])
