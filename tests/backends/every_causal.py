"""A tiny model of each causal language model class in transformers, if its config can be made tiny."""

import contextlib
import inspect

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

# rotary frequencies change after these tokens; windows, chunks and indices of attention end at 6
BOUNDARY = 12
MOST = 8_000_000  # weights
SIZES = dict.fromkeys(
    (
        "hidden_size",
        "d_model",
        "n_embd",
        "dim",
        "embedding_size",
        "word_embed_proj_dim",
        "input_embedding_size",
        "output_embedding_size",
        "lru_width",
        "mamba_d_ssm",
        "attention_hidden_size",
    ),
    32,
)
SIZES |= dict.fromkeys(
    (
        "intermediate_size",
        "ffn_dim",
        "n_inner",
        "d_ff",
        "decoder_ffn_dim",
        "encoder_ffn_dim",
        "ffn_hidden_size",
        "feed_forward_size",
    ),
    48,
)
SIZES |= dict.fromkeys(
    (
        "num_hidden_layers",
        "n_layer",
        "num_layers",
        "n_layers",
        "decoder_layers",
        "encoder_layers",
        "num_decoder_layers",
        "num_encoder_layers",
        "num_experts",
        "num_local_experts",
        "n_routed_experts",
        "moe_num_experts",
    ),
    4,
)
SIZES |= dict.fromkeys(
    (
        "num_attention_heads",
        "n_head",
        "num_heads",
        "n_heads",
        "decoder_attention_heads",
        "encoder_attention_heads",
        "num_decoder_attention_heads",
        "num_encoder_attention_heads",
        "mamba_n_heads",
    ),
    4,
)
SIZES |= dict.fromkeys(
    ("num_key_value_heads", "num_experts_per_tok", "linear_num_value_heads", "linear_num_key_heads"), 2
)
SIZES |= dict.fromkeys(
    (
        "head_dim",
        "qk_rope_head_dim",
        "qk_nope_head_dim",
        "v_head_dim",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "state_size",
        "mamba_d_head",
        "mamba_d_state",
        "rotary_dim",
    ),
    8,
)
SIZES |= dict.fromkeys(
    ("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16
)
SIZES |= dict.fromkeys(("n_group", "topk_group", "mamba_n_groups"), 1)
SIZES |= dict.fromkeys(
    ("sliding_window", "attention_window_size", "attention_chunk_size", "window_size", "index_topk"), 6
)
SIZES |= {
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "is_decoder": True,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
FOUR = ["conv", "full_attention"] * 2
OWN = {  # for classes that need more than sizes
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "mamba2": {"num_heads": 8, "n_groups": 1},
    # its cycles magnify rounding
    "bamba": {"mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "hrm_text": {"initializer_range": 0.05},
    "granitemoehybrid": {"mamba_d_head": 16, "layer_types": ["mamba", "attention"] * 2},
    "lfm2_moe": {"layer_types": FOUR},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
}
LATENT = ("kv_lora_rank", "qk_rope_head_dim")  # attention with a head size for each part
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


class NotTiny(Exception):
    """Raised for a class that the names of SIZES cannot make tiny."""


def tiny(name, **more):
    """Return the config of a class, by its model type."""
    kind = CONFIG_MAPPING[name]
    try:
        default = kind()
        more = {**OWN.get(name, {}), **more}
        known = {
            each
            for each in (*SIZES, *more)
            if hasattr(default, each) or each in inspect.signature(kind.__init__).parameters
        }
        known -= {
            each
            for each in known
            if isinstance(own := getattr(kind, each, None), property) and own.fset is None
        }
        if all(getattr(default, each, None) is not None for each in LATENT):
            known -= {"head_dim"}
            more = {"num_key_value_heads": SIZES["num_attention_heads"], **more}
        return kind(**{each: value for each, value in {**SIZES, **more}.items() if each in known})
    except Exception as error:
        raise NotTiny(f"{type(error).__name__}: {error}") from error


def model(config):
    """Return a model with random weights from a seed. Raise NotTiny also for a model that transformers itself
    cannot run.
    """
    try:
        with torch.device("meta"):
            weights = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
        if weights > MOST:
            raise NotTiny(f"{weights} weights")
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config).eval()
        made(torch.tensor([[3, 4, 5, 6]]), use_cache=False)
        return made
    except NotTiny:
        raise
    except Exception as error:
        raise NotTiny(f"{type(error).__name__}: {error}") from error


def ropes(name):
    """Return the unchanged config of a class, and one with each kind of rotary frequencies that depends on
    the longest row.
    """
    plain = tiny(name)
    made = {"plain": plain}
    width = next(
        (
            len(layer.inv_freq)
            for layer in model(plain).modules()
            if hasattr(layer, "rope_type") and hasattr(layer, "inv_freq")
        ),
        0,
    )
    if width and "rope_type" in (getattr(plain, "rope_parameters", None) or {}):
        own = dict(plain.rope_parameters)
        long = {
            "rope_type": "longrope",
            "factor": 4.0,
            "short_factor": [1.0] * width,
            "long_factor": [4.0] * width,
            "short_mscale": 1.0,
            "long_mscale": 1.2,
            "original_max_position_embeddings": BOUNDARY,
        }
        dynamic = {"rope_type": "dynamic", "factor": 4.0}
        for rope, positions in ((long, 64), (dynamic, BOUNDARY)):
            with contextlib.suppress(NotTiny):
                made[rope["rope_type"]] = tiny(
                    name,
                    rope_parameters=own | rope,
                    max_position_embeddings=positions,
                    original_max_position_embeddings=BOUNDARY,
                )
    return made
