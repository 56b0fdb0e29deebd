"""Load backends by name, and choose devices and dtypes."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from rlflow.config.backend_names import module_name, no_backend
from rlflow.errors import PlanError


def backend(name: str) -> Any:
    """Import a backend and return its module.

    ``name``: one of rlflow's backends, or a dotted module name. Raises PlanError if there is no such module.
    """
    module = module_name(name)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the backend exists, but a module that it imports does not
        raise no_backend(name) from error


def disable_tf32(device: str, dtype: str) -> None:
    """Disable TF32 for float32 runs on a GPU, because it keeps only ten mantissa bits of each factor.

    This overrides environment variables and library settings.
    """
    if device == "cuda" and dtype == "float32":
        torch.set_float32_matmul_precision("highest")


def numbers(dtype: str) -> torch.dtype:
    """Return the dtype of values outside models, such as scores: float64 in a float64 run, else float32."""
    return torch.float64 if dtype == "float64" else torch.float32


def device_of(name: str) -> str:
    """Return the device of a run, "cuda" or "cpu". "auto" becomes "cuda" if there is a GPU.

    Raises PlanError for "cuda" if there is no GPU.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError.of(
            "device",
            "there is no usable GPU",
            found="torch.cuda.is_available() is False",
            expected="--device cpu or auto",
            remedy="--device cpu",
        )
    return name


def device_in(name: str) -> str:
    """Like ``device_of``, but accept "cuda" even if there is no GPU here."""
    return name if name == "cuda" else device_of(name)
