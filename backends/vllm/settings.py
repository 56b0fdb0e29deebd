"""Options of the vllm backend, which users set with ``--ROLE.NAME``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le


@dataclass(frozen=True)
class GeneratorSettings:
    """Options of an engine, whether it runs on a single rank or is shared by several."""

    # ranks of the pool that share one engine, each with a part of every weight
    tensor_parallel: Annotated[int, Ge(1)] = 1
    # bytes of key-value cache; more holds more rows at once; 0: 256 MiB on a CPU, the rest of its share of a
    # GPU
    kv_cache_memory_bytes: Annotated[int, Ge(0)] = 0
    # share of a GPU's memory that the engine takes, cache and weights
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] = 0.5
    # tokens of the longest row, prompt included; 0: as many as model and cache permit
    max_model_len: Annotated[int, Ge(0)] = 0
    # rows that are sampled at once; more is faster and takes more memory
    max_num_seqs: Annotated[int, Ge(1)] = 256
    # true captures no CUDA graphs: quicker to start, slower to sample; a CPU never does
    enforce_eager: bool = False
    # true: a prompt runs through the model once for its samples in a call, and so does a common prefix of
    # prompts
    prefix_caching: bool = True
    sleep_mode: bool = False  # true lets sleep() free the memory of a GPU; on a CPU there is nothing to free
