"""The vLLM internals that the backend uses or replaces. Only ``LLM``, ``SamplingParams`` and the like are
stable between vLLM releases, so no other file of the backend names a module below ``vllm``.

`tests/backends/test_vllm_internals.py` fails if a vLLM release changes one of these internals.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

ENGINE = "vllm.v1.engine.llm_engine"


def make_engine(arguments: Mapping[str, Any]) -> Any:
    """Create an engine from vLLM's arguments. If they don't fit, vLLM's own error is raised."""
    parsed = importlib.import_module("vllm.engine.arg_utils").EngineArgs(**arguments)
    return importlib.import_module(ENGINE).LLMEngine.from_engine_args(parsed)


def only_new_tokens() -> Any:
    """Return the output kind for which each step returns only newly sampled tokens."""
    return importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA


def model_runner(engine: Any) -> Any:
    """Return the object that runs an engine's model in this process."""
    return engine.model_executor.driver_worker.worker.model_runner


def model(engine: Any) -> nn.Module:
    """Return this rank's part of an engine's live model."""
    module: nn.Module = engine.model_executor.driver_worker.worker.get_model()
    return module


def keep_weights_live() -> None:
    """Make vLLM on a CPU leave the weights of linear layers as they are and multiply with PyTorch.

    By default, vLLM packs these weights and empties the originals, so they couldn't be written in place.
    """
    layers: Any = importlib.import_module("vllm.model_executor.layers.utils")
    layers.dispatch_cpu_unquantized_gemm = _multiply_as_stored


def know(architectures: Iterable[str]) -> None:
    """Register these architectures with vLLM in this process. Otherwise, vLLM inspects them in a new process,
    which has to import everything again."""
    registry = importlib.import_module("vllm").ModelRegistry
    for name in architectures:
        if hasattr(known := registry.models.get(name), "load_model_cls"):
            registry.register_model(name, known.load_model_cls())


def keep_groups() -> None:
    """Stop vLLM from destroying torch's process groups when an engine ends. By default, it destroys all
    groups in its process, including the trainer's."""
    core: Any = importlib.import_module("vllm.v1.engine.core")
    core.cleanup_dist_env_and_memory = lambda shutdown_ray=False: None


def leave_memory() -> None:
    """Stop vLLM from binding all of this process's memory, including the trainer's, to one NUMA node."""
    torch.ops._C.init_cpu_memory_env = lambda nodes: None


def engine_group() -> Any:
    """Return vLLM's group of the ranks that share this process's engine. There is only one set of groups per
    process."""
    return importlib.import_module("vllm.distributed.parallel_state").get_tp_group()


def queues() -> Iterator[Any]:
    """Yield the queues through which vLLM's groups in this process send objects."""
    for reference in importlib.import_module("vllm.distributed.parallel_state")._groups.values():
        if (group := reference()) is not None and group.mq_broadcaster is not None:
            yield group.mq_broadcaster


def name_segments(name: Callable[[Any], str]) -> None:
    """Make vLLM on a CPU call ``name`` to name a group's shared memory.

    name: a function of vLLM's communicator, which has ``unique_name`` and ``ranks``.
    """
    module = importlib.import_module("vllm.distributed.device_communicators.cpu_communicator")
    module._CPUSHMDistributed.make_group_name = staticmethod(name)


def _multiply_as_stored(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear
