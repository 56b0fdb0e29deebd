"""The vllm backend, with a Generator that samples with vLLM 0.32 on CPUs and GPUs. To train, combine
``--ROLE.generator vllm`` with another backend's trainer.

The package runs vLLM's engine on one or more ranks, seeds its random draws, and turns its rows into columns.
``python -m rlflow.backends.vllm.install`` installs vLLM for CPUs. `rlflow.training.weight_sync` plans weight
transfers. Importing this package imports neither vLLM nor PyTorch.
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
