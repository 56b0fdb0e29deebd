"""Export a checkpoint as a Hugging Face model folder."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from rlflow.checkpoints import durable, file_names, tensors
from rlflow.checkpoints.reading import Damaged, Loaded, load_latest, read
from rlflow.checkpoints.role_tensors import PARAMETERS, no_role, roles_of
from rlflow.errors import PlanError

SHARD = 5 << 30  # maximum size of a weights file in bytes
# prefix of a critic's value head; Hugging Face models have none, so the value head gets its own file
VALUE_HEAD = "value_head."


def export(source: Path, out: Path, role: str | None = None, *, shard_bytes: int = SHARD) -> Loaded:
    """Export a role's model from a checkpoint to the folder ``out``, and return the checkpoint.

    ``source``: a checkpoint's folder, or a run's folder, whose newest intact checkpoint is then exported.
    ``role``: may be None if the checkpoint has only one role. ``shard_bytes``: maximum size of a weights
    file. ``out`` gets the config, the generation config, the tokenizer, and the weights as safetensors files.

    Raises PlanError if ``out`` isn't empty or can't be written, if the role doesn't exist, or if no
    checkpoint is intact.
    """
    out = Path(os.path.abspath(out))
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise PlanError.of(
            "export-exists",
            f"'{out}' exists and is not empty",
            found="a file, or a folder with content",
            expected="a new or empty folder",
            remedy="choose another folder",
        )
    states: dict[str, Mapping[str, Tensor]] = {}
    loaded = _open(source, role, states)
    roles = roles_of(loaded.snapshot.tensors)
    if len(roles) != 1:
        raise no_role(role, states)
    try:
        _place(
            _content(loaded, roles[0]), loaded.snapshot.tensors[f"{roles[0]}.{PARAMETERS}"], out, shard_bytes
        )
    except OSError as error:
        raise PlanError.of(
            "export-folder",
            f"'{out}' cannot be written",
            found=str(error.strerror or error),
            expected="free space and write permission",
            remedy="choose another folder",
        ) from error
    return loaded


def _open(source: Path, role: str | None, states: dict[str, Mapping[str, Tensor]]) -> Loaded:
    """Load the checkpoint with the parameters of ``role``, or of all roles if it is None.

    The names of all groups of tensors are added to ``states``, for error messages.
    """

    def wanted(group: str) -> bool:
        states[group] = {}
        return group == f"{role}.{PARAMETERS}" if role else group.endswith("." + PARAMETERS)

    if not (source / file_names.MANIFEST).is_file():
        return load_latest(source, wanted)
    try:
        return Loaded(read(source, wanted), source, [])
    except Damaged as damage:
        raise PlanError.of(
            "checkpoint-damaged",
            f"the checkpoint '{source}' is damaged",
            found=str(damage),
            expected="an intact checkpoint",
            remedy="export the run, which uses its newest intact checkpoint",
        ) from damage


def _content(loaded: Loaded, role: str) -> dict[str, bytes]:
    """Return the small files of the exported folder, as name → bytes.

    The dtype in ``config.json`` is that of the saved weights, which may differ from the initial model's.
    """
    files = {
        name.removeprefix(f"{role}/"): data
        for name, data in loaded.snapshot.files.items()
        if name.startswith(f"{role}/")
    }
    if "config.json" not in files:
        raise PlanError.of(
            "no-config",
            f"the checkpoint does not contain a config.json of the role '{role}'",
            found=f"{len(files)} files of the role",
            expected=f"the file {role}/config.json",
            remedy="export a run that trains a model from a folder (--model FOLDER)",
        )
    parameters = loaded.snapshot.tensors[f"{role}.{PARAMETERS}"]
    own = {t.dtype for name, t in parameters.items() if t.is_floating_point() and _is_model(name)}
    dtypes = {str(functools.reduce(torch.promote_types, own)).removeprefix("torch.")} if own else set()
    config = json.loads(files["config.json"])
    known = next((key for key in ("dtype", "torch_dtype") if key in config), "dtype")
    if len(dtypes) == 1 and config.get(known) not in dtypes:
        files["config.json"] = (json.dumps(config | {known: dtypes.pop()}, indent=2) + "\n").encode()
    return files


def _is_model(name: str) -> bool:
    return not name.startswith(VALUE_HEAD)


def _place(files: Mapping[str, bytes], parameters: Mapping[str, Tensor], out: Path, shard_bytes: int) -> None:
    """Write all files to a temporary folder, then rename it to ``out``. Raises OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    aside = out.parent / f".{out.name}-{os.getpid()}"
    os.mkdir(aside)
    try:
        for name, data in files.items():
            durable.write(aside / name, [data])
        _weights(aside, {name: tensor for name, tensor in parameters.items() if _is_model(name)}, shard_bytes)
        head = {
            name.removeprefix(VALUE_HEAD): tensor
            for name, tensor in parameters.items()
            if not _is_model(name)
        }
        if head:
            durable.write(aside / f"{VALUE_HEAD}safetensors", tensors.pieces(head))
        durable.flush_folder(aside)
        durable.move(aside, out)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _weights(folder: Path, parameters: Mapping[str, Tensor], shard_bytes: int) -> None:
    parts = tensors.shards(parameters, shard_bytes)
    where: dict[str, str] = {}
    for name, part in zip(tensors.shard_names("model", len(parts)), parts, strict=True):
        durable.write(folder / name, tensors.pieces(part))
        where |= dict.fromkeys(part, name)
    if len(parts) > 1:
        index = {"metadata": {"total_size": tensors.size(parameters)}, "weight_map": where}
        durable.write(folder / "model.safetensors.index.json", [json.dumps(index, indent=2).encode()])
