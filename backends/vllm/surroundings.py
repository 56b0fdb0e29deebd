"""What vLLM wants of the process that it runs in, and what is put back once an engine stands."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rlflow.errors import PlanError
from rlflow.extras import install_line

RELEASE = "0.32"
WANTED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: its weights and its errors are ours
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # a model is a folder here
}
ON_CPU = {
    # vLLM compiles the gathering of log-probs even for eager models: seconds, and a compiler
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner in which rows draw as they do in the local backend
}
OPEN = {"VLLM_LOGGING_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": "lo"}  # where the user has no say


@contextlib.contextmanager
def prepared(device: str, **variables: str) -> Iterator[None]:
    """The environment in which an engine is made. vLLM leaves variables behind, such as LD_PRELOAD, and takes
    torch.set_num_threads away, which child processes and other threads would feel: afterwards all is as it
    was, except for its own, VLLM_…."""
    before, threads = dict(os.environ), torch.set_num_threads
    os.environ.update(WANTED | (ON_CPU if device == "cpu" else {}) | variables)
    for name, value in OPEN.items():
        os.environ.setdefault(name, value)
    try:
        with warnings.catch_warnings(action="ignore"):  # vLLM looks at everything that PyTorch deprecates
            yield
    finally:
        torch.set_num_threads = threads
        for name in set(os.environ) - set(before):
            if not name.startswith("VLLM_"):
                del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if not name.startswith("VLLM_")})


def imported(device: str) -> Any:
    """The package. Raises PlanError where it is missing, broken, or another release."""
    remedy = install_line("vllm", device)
    level = os.environ.get("VLLM_LOGGING_LEVEL", OPEN["VLLM_LOGGING_LEVEL"])
    # it sets its own after its first words, of a Triton without CPUs
    logging.getLogger("vllm").setLevel(level)
    try:
        vllm = importlib.import_module("vllm")
        importlib.import_module("vllm.v1.engine.llm_engine")
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
            "the backend 'vllm' works with another release of vLLM",
            found=str(vllm.__version__),
            expected=f"{RELEASE}.*",
            remedy=remedy,
        )
    return vllm


def keep_weights_live() -> None:
    """vLLM packs the weights of linear layers on a CPU and empties the originals, so that nothing could be
    written into them: this leaves them as they are, to be multiplied with by PyTorch."""
    layers: Any = importlib.import_module("vllm.model_executor.layers.utils")
    layers.dispatch_cpu_unquantized_gemm = _multiply_as_stored


def know(architectures: Iterable[str]) -> None:
    """vLLM asks what a model can do in a process of its own, which imports it all again: this asks here."""
    registry = importlib.import_module("vllm").ModelRegistry
    for name in architectures:
        if hasattr(known := registry.models.get(name), "load_model_cls"):
            registry.register_model(name, known.load_model_cls())


def keep_groups() -> None:
    """An engine that ends destroys all torch groups of its process, the trainer's and those of other engines
    too: this leaves them."""
    core: Any = importlib.import_module("vllm.v1.engine.core")
    core.cleanup_dist_env_and_memory = lambda shutdown_ray=False: None


def leave_memory() -> None:
    """vLLM binds all memory of its process to one NUMA node of a CPU, the trainer's too: this leaves it."""
    torch.ops._C.init_cpu_memory_env = lambda nodes: None


def _multiply_as_stored(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear
