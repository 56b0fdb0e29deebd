"""Read weights from a model folder, so that each rank reads only the part of each weight that it keeps."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from rlflow.backends.fsdp.ranks import box, own
from rlflow.backends.local.read_model import load_whole, quiet
from rlflow.training import pretrained
from rlflow.training.protocols import ModelSpec


def load_empty(
    kind: Any, spec: ModelSpec, dtype: torch.dtype, allowed: tuple[str, ...], **options: Any
) -> Any:
    """Return a model whose parameters have no storage (its buffers do).

    The complete model is returned instead, as by ``load_whole``, if the folder's safetensors don't have
    weights with the model's names and shapes (merged experts), or if the model can't be constructed without
    its weights.
    """
    config = pretrained.read_config(Path(str(spec.folder)), **options)
    try:
        with quiet(), _without_storage():
            module = pretrained.empty_model(kind, config, dtype)
    except RuntimeError:  # the constructor reads weights that it has just drawn
        return load_whole(kind, spec, dtype, allowed, **options)
    files = Files(Path(str(spec.folder)), module.base_model_prefix)
    lacking = [
        name
        for names, tensor in tied(module.state_dict(keep_vars=True))
        if files.find(names, tensor) is None
        for name in names
    ]
    if set(lacking) - set(allowed):
        return load_whole(kind, spec, dtype, allowed, **options)
    if (files.folder / "generation_config.json").is_file():
        module.generation_config = pretrained.read_generation_config(files.folder)
    return module


def tied(tensors: dict[str, Tensor]) -> Iterator[tuple[list[str], Tensor]]:
    """Yield (all names, tensor) for each distinct tensor, in the order of the first names."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return ((group, tensors[group[0]]) for group in names.values())


class Files:
    """The safetensors of a model folder.

    prefix: the name of the backbone, such as ``model``. Names in the files may come without it.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.folder, self.prefix = folder, f"{prefix}."
        self.at = {name: folder / file for name, file in _where(folder).items()}

    def find(self, names: Iterable[str], tensor: Tensor) -> str | None:
        """Return the name that the files use for this tensor, or None if they don't have it.

        A match is one of ``names``, with or without the prefix, and has the tensor's shape.
        """
        for name in names:
            for candidate in (name, name.removeprefix(self.prefix), self.prefix + name):
                if candidate in self.at and self._shape(candidate) == list(tensor.shape):
                    return candidate
        return None

    def _shape(self, name: str) -> list[int]:
        with safe_open(self.at[name], "pt") as file:
            return list(file.get_slice(name).get_shape())

    def read(self, names: Iterable[str], target: Tensor) -> None:
        """Copy this rank's part of a weight, which may have several ``names``, from the files into
        ``target``. If the files don't have the weight, fill ``target`` with zeros."""
        name, part = self.find(names, target), own(target)
        if name is None:
            part.zero_()
        elif part.numel():
            with safe_open(self.at[name], "pt") as file:
                part.copy_(file.get_slice(name)[box(target)])

    def whole(self, groups: Iterable[tuple[list[str], Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (first name, complete tensor) from the files, one tensor at a time.

        groups: (all names of a weight, its tensor) pairs. Raises KeyError if the files don't have a tensor.
        """
        for names, tensor in groups:
            name = self.find(names, tensor)
            if name is None:
                raise KeyError(names[0])
            with safe_open(self.at[name], "pt") as file:
                yield names[0], file.get_tensor(name)


def _where(folder: Path) -> dict[str, str]:
    """Map each weight's name to its file. As in transformers, ``model.safetensors`` takes precedence over an
    index."""
    if (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", "pt") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")
    index = folder / "model.safetensors.index.json"
    return dict(json.loads(index.read_text())["weight_map"]) if index.is_file() else {}


@contextlib.contextmanager
def _without_storage() -> Iterator[None]:
    """Create the parameters of new modules on the meta device inside a ``with`` block. Buffers aren't
    affected."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
