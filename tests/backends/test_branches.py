"""Rows that share the keys and values of their prompts compute the same as alone: one step's attention, and
full models.
"""

import pytest
import torch
import transformers
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from rlflow.backends.local.branches import BranchedLayer, Branches, StepMask, attend_step, branched
from rlflow.backends.local.cache import GrowingLayer, new_cache
from rlflow.backends.local.decode import advance, can_branch, prefill
from rlflow.backends.local.network import load_network
from rlflow.training.protocols import ModelSpec

HEADS, KINDS, SIZE = 6, 3, 4
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_key_value_heads": 2,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.3,
}


def normal(chance, *shape):
    return torch.randn(*shape, generator=chance, dtype=torch.float64)


def alone(query, keys, values, visible):
    """Compute attention of one query [heads, size] to keys and values [key heads, tokens, size]; a mask hides
    some tokens.
    """
    keys, values = (x.repeat_interleave(HEADS // KINDS, 0) for x in (keys, values))
    scores = (keys @ query[..., None])[..., 0] / SIZE**0.5
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)[:, None].matmul(values)[:, 0]


@pytest.mark.parametrize(
    "visible", [None, sliding_window_causal_mask_function(4), chunked_causal_mask_function(5, torch.zeros(3))]
)
@pytest.mark.parametrize("padded", [False, True])
def test_shared_attention_equals_attention_of_each_row(visible, padded):
    """Rows of three prompts leave one after another, including all rows of one prompt; the others grow by a
    token per step.
    """
    chance, width = torch.Generator().manual_seed(0), 7
    pad = torch.tensor([0, 3, 1]) if padded else torch.zeros(3, dtype=torch.int64)
    layer = GrowingLayer()
    keys, values = layer.update(normal(chance, 3, KINDS, width, SIZE), normal(chance, 3, KINDS, width, SIZE))
    of = torch.tensor([0, 0, 0, 1, 2, 2])
    whole = [[keys[p], values[p]] for p in of]
    branch, numbers = BranchedLayer(layer), torch.arange(6)
    branches = Branches([branch], of, torch.arange(width) >= pad[:, None] if padded else None)
    for step, leaving in enumerate([None, 4, None, 3, 0, None]):
        if leaving is not None:
            index = (numbers != leaving).nonzero()[:, 0]
            numbers = numbers[index]
            branches.take(index)
        query, key, value = (normal(chance, len(numbers), heads, 1, SIZE) for heads in (HEADS, KINDS, KINDS))
        own = branch.update(key, value)
        assert branch.get_seq_length() == width + step + 1
        out = attend_step(query, *own, StepMask(branches, visible))
        for row, number in enumerate(numbers.tolist()):
            whole[number] = [
                torch.cat(pair, 1) for pair in zip(whole[number], (key[row], value[row]), strict=True)
            ]
            places = torch.arange(width + step + 1)
            seen = (
                torch.ones(len(places), dtype=torch.bool)
                if visible is None
                else visible(0, 0, places[-1], places)
            )
            expected = alone(query[row, :, 0], *whole[number], seen & (places >= pad[of[number]]))
            torch.testing.assert_close(out[row, 0], expected, rtol=1e-12, atol=1e-12)
    assert len(branch.before[0]) == 2  # the second prompt left with its only row


def test_keys_of_another_cache_are_refused():
    layer = GrowingLayer()
    layer.update(*torch.zeros(2, 1, 1, 2, 4))
    mask = StepMask(Branches([BranchedLayer(layer)], torch.tensor([0]), None), None)
    with pytest.raises(ValueError, match="found keys of no layer in the cache"):
        attend_step(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), mask)


def test_low_precision_keeps_a_copy_for_each_row():
    cache = new_cache(transformers.Qwen3Config(**SMALL))
    for number in range(3):
        cache.update(*torch.zeros(2, 1, 2, 3, 8, dtype=torch.bfloat16), number)
    layers = list(cache.layers)
    assert branched(cache, torch.tensor([0, 0]), None) is None
    assert cache.layers == layers


def network_of(folder, name, dtype="float64", **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SMALL | settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return load_network(ModelSpec(folder, dtype=dtype))


FAMILIES = {
    "Qwen3": {},
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": 6},
    "Gemma3Text": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize("name", FAMILIES)
def test_models_with_shared_prompts_compute_the_same_as_with_copies(tmp_path, name):
    network = network_of(tmp_path, name, **FAMILIES[name])
    assert can_branch(network)
    chance = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 64, (length,), generator=chance) for length in (9, 2, 5)]
    of, kept = torch.tensor([0, 0, 0, 1, 2, 2]), torch.tensor([0, 2, 4, 5])
    with torch.inference_mode():
        apart, together = (prefill(network, prompts, 12).go_on(of, branch) for branch in (False, True))
        for step in range(12):
            token = torch.randint(3, 64, (len(apart.numbers),), generator=chance)
            one, other = (advance(network, rows, token, step) for rows in (apart, together))
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
            if step == 6:
                apart, together = apart.take(kept), together.take(kept)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4}),  # attention biases instead of positions
        # attention sinks
        ("GptOss", {"num_local_experts": 4, "sliding_window": 8, "layer_types": ["full_attention"] * 3}),
        ("Lfm2", {"layer_types": ["conv", "full_attention", "conv"]}),  # layers with state
    ],
)
def test_other_models_keep_a_copy_for_each_row(tmp_path, name, settings):
    assert not can_branch(network_of(tmp_path, name, dtype="float32", **settings))
