"""The installed vLLM has the parts that the backend uses or replaces, and only one file names them."""

import ast
import inspect

import pytest
from private_parts import check_parts, elsewhere, found

from rlflow.backends.vllm.surroundings import imported, prepared

FILE = "backends/vllm/internals.py"
INSIDE = ("distributed", "engine", "model_executor", "sampling_params", "v1")
PARTS = {
    "vllm.SamplingParams": None,
    "vllm.ModelRegistry.register_model": ("model_arch", "model_cls"),
    "vllm.ModelRegistry.models": None,
    "vllm.sampling_params.RequestOutputKind.DELTA": None,
    "vllm.engine.arg_utils.EngineArgs": (
        "skip_tokenizer_init",
        "logprobs_mode",
        "distributed_executor_backend",
        "kv_cache_memory_bytes",
        "async_scheduling",
        "enable_sleep_mode",
    ),
    "vllm.v1.engine.llm_engine.LLMEngine.from_engine_args": ("engine_args",),
    "vllm.v1.engine.llm_engine.LLMEngine.add_request": ("request_id", "prompt", "params"),
    "vllm.v1.engine.llm_engine.LLMEngine.abort_request": ("request_ids",),
    "vllm.v1.engine.llm_engine.LLMEngine.step": ("self",),
    "vllm.v1.engine.llm_engine.LLMEngine.has_unfinished_requests": ("self",),
    "vllm.v1.engine.llm_engine.LLMEngine.collective_rpc": ("method", "kwargs"),
    "vllm.v1.engine.llm_engine.LLMEngine.reset_prefix_cache": ("reset_running_requests",),
    "vllm.v1.engine.llm_engine.LLMEngine.sleep": ("level",),
    "vllm.v1.engine.llm_engine.LLMEngine.wake_up": ("tags",),
    "vllm.v1.engine.core.cleanup_dist_env_and_memory": ("shutdown_ray",),
    "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm": ("layer", "remove_weight"),
    "vllm.distributed.parallel_state.get_tp_group": (),
    "vllm.distributed.parallel_state._groups": None,
    "vllm.distributed.device_communicators.cpu_communicator._CPUSHMDistributed.make_group_name": (
        "communicator",
    ),
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward": None,
}


@pytest.mark.slow  # imports vLLM
@pytest.mark.usefixtures("vllm_installed")
def test_vllm_has_the_parts():
    with prepared("cpu"):
        imported("cpu")
        check_parts("vllm", FILE, PARTS)
        core = ast.parse(inspect.getsource(found("vllm.v1.engine.core")))
    called = {
        node.func.id for node in ast.walk(core) if isinstance(node, ast.Call) and hasattr(node.func, "id")
    }
    assert "cleanup_dist_env_and_memory" in called, "keep_groups replaces a function that vLLM does not call"


def test_only_one_file_names_modules_inside_vllm():
    assert elsewhere("vllm", [FILE], PARTS, *(f"vllm.{name}." for name in INSIDE)) == []
