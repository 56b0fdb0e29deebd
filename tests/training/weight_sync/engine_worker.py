"""One tensor-parallel rank of vLLM's own models: weights written along the trace, compared with vLLM's own
reload.

engine_worker.py FOLDER RANK RANKS

Prints a line of JSON per model: problems (none if all is well), modules left to the engine, milliseconds of
the trace.
"""

import json
import os
import random
import string
import sys
import time
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

import torch
import transformers
import vllm.model_executor.layers.utils as dispatch
from torch import nn
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from rlflow.backends.vllm.internals import know
from rlflow.training.weight_sync.kinds import replicated
from rlflow.training.weight_sync.proof import patterns, prove, together
from rlflow.training.weight_sync.shards import ties_of
from rlflow.training.weight_sync.trace import trace

SMALL = {
    "vocab_size": 70,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "dtype": "float32",
}
MODELS = {
    "Qwen3": transformers.Qwen3Config(**SMALL, tie_word_embeddings=False, architectures=["Qwen3ForCausalLM"]),
    "Qwen3 tied": transformers.Qwen3Config(
        **SMALL, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"]
    ),
    "Llama, one KV head": transformers.LlamaConfig(
        **SMALL | {"num_key_value_heads": 1}, architectures=["LlamaForCausalLM"]
    ),
    "GPT-2": transformers.GPT2Config(
        vocab_size=70,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        dtype="float32",
        bos_token_id=1,
        eos_token_id=2,
        architectures=["GPT2LMHeadModel"],
    ),
    "Gemma 3": transformers.Gemma3TextConfig(**SMALL, sliding_window=16, architectures=["Gemma3ForCausalLM"]),
}


def keep_weights_live() -> None:
    """Keep linear weights unpacked. On a CPU vLLM would pack them; unpacked, it computes like on a GPU."""
    torch.accelerator.empty_cache = lambda: None  # like vLLM's own CPU worker
    dispatch.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
        layer, "cpu_linear", nn.functional.linear
    )


def checkpoint(config) -> tuple[dict, dict[str, str]]:
    """Return a trainer's tensors by name, a tied head under both names; and the tied names."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    state = model.state_dict()
    return replicated(
        {name: tuple(tensor.shape) for name, tensor in state.items()}, "float32", 1
    ).tensors, ties_of(state.items())


def examined(
    folder: Path, name: str, rank: int, ranks: int, renamed: bool = False, live: bool = True
) -> dict:
    config = MODELS[name]
    know(config.architectures)
    where = folder / f"{name} {rank}"
    config.save_pretrained(where)
    arguments = EngineArgs(
        str(where),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=64,
        tensor_parallel_size=ranks,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=32 << 20,
        distributed_executor_backend="external_launcher" if ranks > 1 else None,
    )
    settings = arguments.create_engine_config()
    with set_current_vllm_config(settings):
        model = get_model(vllm_config=settings)
        return compared(model, settings.model_config, *checkpoint(config), renamed)


def compared(model: nn.Module, config, tensors: dict, ties: dict[str, str], renamed: bool) -> dict:
    names = {
        name: "".join(random.Random(name).sample(string.ascii_lowercase, 12)) if renamed else name
        for name in tensors
    }
    back = {theirs: ours for ours, theirs in names.items()}
    tensors = {names[name]: spread for name, spread in tensors.items()}
    ties = {names[name]: names[other] for name, other in ties.items()}

    def load(weights):
        return model.load_weights((back[name], tensor) for name, tensor in weights)

    def reload(weights):
        initialize_layerwise_reload(model)
        load(weights)
        finalize_layerwise_reload(model, config)

    start = time.perf_counter()
    traced = trace(model, tensors, load)
    milliseconds = 1000 * (time.perf_counter() - start)
    made, alike = prove(model, traced, tensors, reload, ties), together(traced.ties, ties)
    reload(patterns(tensors, 3, alike))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reload(patterns(tensors, 4, alike))
    for name, values in patterns({name: tensors[name] for name in made.pieces}, 3, alike):
        for piece in made.pieces[name].pieces:
            piece.view.copy_(values[tuple(slice(*span) for span in piece.box)])
    made.finish(reload)
    problems = [
        name for name, tensor in model.state_dict().items() if not torch.equal(tensor, expected[name])
    ]
    state = sum(p.numel() for p in model.parameters())
    direct = sum(
        piece.view.numel() for name, p in made.pieces.items() if name not in made.staged for piece in p.pieces
    )
    return {
        "problems": problems,
        "by engine": made.why,
        "failed": traced.failed,
        "ties": ties,
        "milliseconds": milliseconds,
        "direct": direct / state,
    }


def main() -> None:
    folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    keep_weights_live()
    from vllm.config import VllmConfig

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(ranks, rank, f"file://{folder}/meeting", rank, "gloo")
        initialize_model_parallel(ranks)
    found = {name: examined(folder, name, rank, ranks) for name in MODELS}
    found["Qwen3 renamed"] = examined(folder, "Qwen3 tied", rank, ranks, renamed=True)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
