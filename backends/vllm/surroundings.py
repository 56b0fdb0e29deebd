"""Prepare this process for vLLM, and undo the changes that vLLM makes to it when creating an engine."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from rlflow.backends.vllm.internals import ENGINE
from rlflow.errors import PlanError
from rlflow.extras import install_line

RELEASE = "0.32"
WANTED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # runs the engine in this process, with access to its weights
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # models are local folders
}
ON_CPU = {
    # vLLM compiles the gathering of log-probs even for eager models, which takes seconds and a compiler
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # in this runner, rows draw as in the local backend
}
OPEN = {"VLLM_LOGGING_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}  # defaults that the user may override


@contextlib.contextmanager
def prepared(device: str, **variables: str) -> Iterator[None]:
    """Prepare this process to create an engine inside a ``with`` block, and clean up afterwards.
    ``variables`` are extra environment variables.

    vLLM leaves environment variables such as LD_PRELOAD behind and replaces torch.set_num_threads, which
    would affect child processes and other threads. When the block ends, everything is restored except vLLM's
    own variables (VLLM_…).
    """
    before, threads = dict(os.environ), torch.set_num_threads
    os.environ.update(WANTED | (ON_CPU if device == "cpu" else {}) | variables)
    for name, value in OPEN.items():
        os.environ.setdefault(name, value)
    try:
        with warnings.catch_warnings(action="ignore"):  # vLLM touches everything that PyTorch deprecates
            yield
    finally:
        torch.set_num_threads = threads
        for name in set(os.environ) - set(before):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if not name.startswith("VLLM_")})


def imported(device: str) -> Any:
    """Import vLLM and return the package. Raises PlanError if it is missing, broken, or the wrong release."""
    remedy = install_line("vllm", device)
    level = os.environ.get("VLLM_LOGGING_LEVEL", OPEN["VLLM_LOGGING_LEVEL"])
    # vLLM sets its own level only after it has printed a warning about Triton without CPUs
    logging.getLogger("vllm").setLevel(level)
    try:
        vllm = importlib.import_module("vllm")
        importlib.import_module(ENGINE)
    except (ImportError, RuntimeError, OSError) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "vllm"
        raise PlanError.of(
            "missing-package" if missing else "broken-package",
            "the package 'vllm' is not installed" if missing else "the package 'vllm' cannot be imported",
            found=f"{type(error).__name__}: {error}",
            expected=f"vLLM {RELEASE}",
            remedy=remedy,
        ) from error
    if not str(vllm.__version__).startswith(f"{RELEASE}."):
        raise PlanError.of(
            "package-version",
            "the backend 'vllm' needs another release of vLLM",
            found=str(vllm.__version__),
            expected=f"{RELEASE}.*",
            remedy=remedy,
        )
    return vllm
