"""Where the state of a trainer lies: on its device, or asleep in host memory."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from rlflow.backends.deepspeed.partitions import flats, is_cut, link_moments
from rlflow.backends.local.network import Network


def sleep(engine: Any, network: Network) -> None:
    """Everything to host memory. ZeRO 1 and 2 do it themselves; 3 does so for optimizers of DeepSpeed alone, so that we move its state."""
    optimizer = engine.optimizer if engine is not None else None
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        engine.offload_states(pin_memory=False)
    elif optimizer is not None:
        optimizer.empty_partition_cache()
        if hasattr(optimizer, "lp_param_buffer"):
            engine.offload_states(include=_gradients(), pin_memory=False)
            _move_cut(optimizer, torch.device("cpu"))
    move_rest(network, torch.device("cpu"))


def wake(engine: Any, network: Network, device: torch.device) -> None:
    """Everything back to the device."""
    optimizer = engine.optimizer if engine is not None else None
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        engine.reload_states()
        link_moments(optimizer)
    elif hasattr(optimizer, "lp_param_buffer"):
        _move_cut(optimizer, device)
        engine.reload_states()
    move_rest(network, device)


def move_rest(network: Network, device: torch.device) -> None:
    """What no optimizer of DeepSpeed's looks after: buffers, and weights that do not learn."""
    for tensor in [*network.module.parameters(), *network.module.buffers(), *(network.head.parameters() if network.head else ())]:
        if is_cut(tensor):
            tensor.ds_tensor.data = tensor.ds_tensor.data.to(device)
        if tensor.device.type != device.type:
            tensor.data = tensor.data.to(device)


def _gradients() -> list[Any]:
    states = importlib.import_module("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum
    return [states.lp_grads, states.contiguous_grad_buffer]


def _move_cut(optimizer: Any, device: torch.device) -> None:
    """The parts of weights that stage 3 trains, its own copies of them, and their moments."""
    for flat in flats(optimizer):
        flat.data = flat.data.to(device)
    for state in optimizer.optimizer.state.values():
        state.update({name: tensor.to(device) for name, tensor in state.items() if tensor.dim()})
    buffer = optimizer.lp_param_buffer
    buffer.data = buffer.data.to(device)
    start = 0
    for parameter in (p for group in optimizer.fp16_groups for p in group):
        size = parameter.ds_tensor.ds_numel
        parameter.ds_tensor.data = buffer.narrow(0, start, size)
        start += size
    optimizer.fp16_partitioned_groups_flat.clear()
    optimizer._set_fp16_partitioned_groups_flat()
