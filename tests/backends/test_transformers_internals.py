"""The installed transformers has the parts that the backends use or replace, and only one file names them."""

import inspect

import pytest
import torch
from private_parts import check_parts, elsewhere
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

from rlflow.backends.local import transformers_internals as internals

FILE = "backends/local/transformers_internals.py"
FOLDER_CODE = "rlflow/training/pretrained.py"
INSIDE = ("cache_utils", "dynamic_module_utils", "masking_utils", "modeling_", "pytorch_utils")
PARTS = {
    "transformers.cache_utils.DynamicLayer.update": ("self", "key_states", "value_states"),
    "transformers.cache_utils.DynamicLayer.reorder_cache": ("self", "beam_idx"),
    "transformers.cache_utils.DynamicSlidingWindowLayer": None,
    "transformers.masking_utils.sdpa_mask": (
        "attention_mask",
        "allow_is_causal_skip",
        "use_vmap",
        "local_size",
    ),
    "transformers.masking_utils.causal_mask_function": ("batch_idx", "head_idx", "q_idx", "kv_idx"),
    "transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS": None,
    "transformers.modeling_layers.GradientCheckpointingLayer": None,
    "transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS": None,
    "transformers.modeling_utils.unwrap_model": ("model", "recursive"),
    "transformers.pytorch_utils.Conv1D": ("nf", "nx"),
}


def test_transformers_has_the_parts():
    check_parts("transformers", FILE, PARTS)
    check_parts("transformers", FOLDER_CODE, {"transformers.dynamic_module_utils.TIME_OUT_REMOTE_CODE": None})


def test_a_forward_takes_a_cache_by_a_known_name():
    names = inspect.signature(Qwen3Model.forward).parameters
    assert {*names} & {*internals.CACHE_ARGUMENTS}, f"add the new name to CACHE_ARGUMENTS in {FILE}"


def test_only_one_file_names_parts_inside_transformers():
    inside = (f"transformers.{name}" for name in INSIDE)
    assert elsewhere("transformers", [FILE, FOLDER_CODE], PARTS, *inside) == []


@pytest.mark.parametrize(
    "functions", [internals.ALL_ATTENTION_FUNCTIONS, internals.ALL_MASK_ATTENTION_FUNCTIONS]
)
def test_a_model_calls_the_functions_that_replace_those_of_transformers(monkeypatch, functions):
    called, plain = [], functions["sdpa"]
    monkeypatch.setitem(functions, "sdpa", lambda *args, **more: (called.append(1), plain(*args, **more))[1])
    config = Qwen3Config(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=8,
        attn_implementation="sdpa",
    )
    model = Qwen3ForCausalLM(config)
    assert isinstance(model.model.layers[0], internals.GradientCheckpointingLayer)
    model(torch.tensor([[1, 2]]))
    assert called
