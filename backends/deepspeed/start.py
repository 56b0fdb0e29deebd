"""Start DeepSpeed in this process with the pool's torch group, without any output or compilation."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from rlflow.backends.local.settings import TrainerSettings
from rlflow.extras import INSTALL, require
from rlflow.training.peers import BUCKET


def start(device: str) -> Any:
    """Import DeepSpeed and return the package, ready for ``initialize``.

    If the process has no torch group, a group with a single rank is created. Raises PlanError if DeepSpeed
    isn't installed.
    """
    # otherwise DeepSpeed guesses and prints a line
    os.environ.setdefault("DS_ACCELERATOR", torch.device(device).type)
    package = require("deepspeed", extra="deepspeed", install=INSTALL["deepspeed"])
    ops = importlib.import_module("deepspeed.ops")
    # otherwise DeepSpeed runs a compiler to find out what it could compile
    compiled = vars(ops).setdefault("__compatible_ops__", {})
    compiled["deepspeed_shm_comm"] = False  # an all-reduce that DeepSpeed would compile at first use
    # DeepSpeed uses deprecated names of torch
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    os.environ.setdefault(
        "LOCAL_RANK", str(torch.cuda.current_device()) if torch.device(device).type == "cuda" else "0"
    )
    if not dist.is_initialized():
        _alone(device)
    with quiet():
        package.init_distributed(auto_mpi_discovery=False, verbose=False)
    return package


def _alone(device: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # listen only on this machine
    backend = "cpu:gloo,cuda:nccl" if torch.device(device).type == "cuda" else "gloo"
    dist.init_process_group(backend, store=cast("Any", dist).HashStore(), rank=0, world_size=1)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence DeepSpeed's reports, and its warning about optimizers other than its own, inside a ``with``
    block."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(max(level, logging.WARNING))


def config(stage: int, settings: TrainerSettings) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a ZeRO stage. An optimizer step may have any number of
    micro-batches; rlflow decides when it ends."""
    elements = BUCKET // 4
    zero = {
        "stage": stage,
        "reduce_bucket_size": elements,
        "allgather_bucket_size": elements,
        "overlap_comm": False,
    }
    if stage == 3:  # weights, even small ones, are complete only while their layer runs
        zero |= {
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": elements,
            "stage3_max_live_parameters": 4 * elements,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,  # only used by DeepSpeed to count samples
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.max_grad_norm if settings.max_grad_norm < float("inf") else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


def engine(
    package: Any,
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    stage: int,
    settings: TrainerSettings,
) -> Any:
    """Wrap ``module``, whose weights are in host memory, in a DeepSpeed engine.

    Under stage 3, weights move to the device one at a time, and this rank keeps only its part of each.
    """
    chosen = config(stage, settings)
    with quiet():
        if stage == 3:
            package.zero.Init(module=module, config_dict_or_path=chosen, mem_efficient_linear=False)
        return package.initialize(model=module, optimizer=optimizer, config=chosen, dist_init_required=False)[
            0
        ]
