"""Recorded lengths for transformers' `generate`: a real model samples rows of exactly these lengths."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlflow.benchmarks.peers._lengths import Recorded, ends_of

ENDS = [3, 5]
PAD = 0


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=ENDS,
        pad_token_id=PAD,
    )
    return Qwen3ForCausalLM(config).eval()


def recorded(folder, lengths):
    file = folder / "lengths.json"
    file.write_text(json.dumps({"lengths": lengths}))
    return Recorded(str(file), ENDS)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    width=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_each_row_has_its_recorded_length(lengths, width, seed, model, tmp_path_factory):
    forced = recorded(tmp_path_factory.mktemp("lengths"), lengths)
    torch.manual_seed(seed)
    prompts = torch.full((len(lengths), width), 7)
    ids = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=max(lengths),
        logits_processor=forced.processors(forced.take(len(lengths)), width),
    )
    for row, length in zip(ids[:, width:].tolist(), lengths, strict=True):
        assert [token in ENDS for token in row[:length]] == [False] * (length - 1) + [True]
        assert row[length:] == [PAD] * (len(row) - length)


def test_calls_take_lengths_in_order_and_start_again_at_the_end(tmp_path):
    forced = recorded(tmp_path, [4, 1, 9])
    assert [forced.take(rows).tolist() for rows in (2, 2, 4)] == [[4, 1], [9, 4], [1, 9, 4, 1]]


class Tokenizer:
    eos_token_id = 5


@pytest.mark.parametrize(("named", "ends"), [(None, [5]), (5, [5]), (3, [5, 3]), ([3, 5, 6], [5, 3, 6])])
def test_all_end_tokens_are_known_and_the_tokenizers_comes_first(named, ends, model):
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = named
    try:
        assert ends_of(model, Tokenizer) == ends
    finally:
        model.generation_config.eos_token_id = before
