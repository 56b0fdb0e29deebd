"""The vllm backend: a Generator that samples with vLLM 0.32, on CPUs and GPUs. For training, use
``--ROLE.generator vllm`` with a trainer of another backend.

The package runs the engine on one or several ranks, seeds its draws, makes columns from its rows, and can
install vLLM. Plans of weight transfers are in `rlflow.training.weight_sync`. ``python -m
rlflow.backends.vllm.install`` installs vLLM for CPUs. Importing this package loads neither vLLM nor PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlflow.backends.vllm.generator import Generator

__all__ = ["Generator"]


def __getattr__(name: str) -> Any:
    if name != "Generator":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rlflow.backends.vllm.generator import Generator

    return Generator
