"""Memory estimates from a model's configuration and file headers. preview/test_sizes.py compares them with
loaded models.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from rlflow.compiler.byte_sizes import ModelFacts


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({"num_hidden_layers": 5, "num_attention_heads": 6, "hidden_size": 48}, 2 * 5 * 6 * 8),
        (
            {
                "num_hidden_layers": 5,
                "num_attention_heads": 6,
                "hidden_size": 48,
                "num_key_value_heads": 3,
                "head_dim": 16,
            },
            2 * 5 * 3 * 16,
        ),
        ({"n_layer": 7, "n_head": 4, "n_embd": 12}, 2 * 7 * 4 * 3),
        ({"num_hidden_layers": 5, "hidden_size": 48}, None),
        ({"num_attention_heads": 5, "hidden_size": 45}, None),
    ],
)
def test_the_cache_of_a_token_has_a_key_and_a_value_per_layer(config, numbers):
    assert ModelFacts(config, {}).cache_numbers == numbers


def test_adapters_are_on_linear_layers_or_only_on_attention():
    shapes = {
        "embed.weight": (10, 4),
        "layers.0.attn.q.weight": (4, 6),
        "layers.0.mlp.up.weight": (4, 16),
        "norm.weight": (4,),
        "lm_head.weight": (10, 4),
    }
    facts = ModelFacts({"hidden_size": 4}, shapes)
    assert facts.adapters(3, attention=False) == 3 * (4 + 6) + 3 * (4 + 16)
    assert facts.adapters(3, attention=True) == 3 * (4 + 6)
    assert (facts.parameters, facts.hidden, facts.unused_head) == (40 + 24 + 64 + 4 + 40, 4, 40)
    assert ModelFacts({}, {}).parameters is None


@pytest.mark.parametrize(
    ("config", "head"),
    [({}, False), ({"tie_word_embeddings": True}, False), ({"tie_word_embeddings": False}, True)],
)
def test_tied_weights_count_once_and_are_tied_by_default(tmp_path, config, head):
    save_file(
        {"lm_head.weight": torch.zeros(4, 2), "embed.weight": torch.zeros(4, 2)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ("lm_head.weight" in ModelFacts.of(tmp_path).shapes) is head
