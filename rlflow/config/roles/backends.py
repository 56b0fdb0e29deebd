"""Backends by name, and the models of a run made with them."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from rlflow.config.backend_names import module_name, no_backend
from rlflow.errors import PlanError


def backend(name: str) -> Any:
    """The module of a backend: a shipped one's name, or a dotted module. Raises PlanError."""
    module = module_name(name)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it imports is not
        raise no_backend(name) from error


def keep_whole_products(device: str, dtype: str) -> None:
    """Products of float32 stay float32 on a GPU, where TF32 would keep ten bits of each factor, whatever the
    environment or a library has said before."""
    if device == "cuda" and dtype == "float32":
        torch.set_float32_matmul_precision("highest")


def numbers(dtype: str) -> torch.dtype:
    """The dtype of what a run computes beside its models, such as scores: float64 in a float64 run, else
    float32."""
    return torch.float64 if dtype == "float64" else torch.float32


def device_of(name: str) -> str:
    """auto → cuda where there is one. Raises PlanError for cuda without a GPU."""
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
    """The kind of device that a run would have, which need not be here."""
    return name if name == "cuda" else device_of(name)
