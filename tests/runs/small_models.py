"""Small random models of real architectures with a byte tokenizer, saved as Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

BOS, EOS, WORDS = 0, 1, 2 + 256
MARKS = {
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "pad_token_id": EOS,
    "initializer_range": 0.1,
    "vocab_size": WORDS,
}
SIZE = MARKS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZE, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZE, tie_word_embeddings=False),
    "gpt2": GPT2Config(**MARKS, n_embd=32, n_layer=2, n_head=4, n_positions=1024),
    "gemma3": Gemma3TextConfig(**SIZE, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
}
CHAT = """{%- if messages[0]['role'] != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # ChatML, as in Qwen's models


def make(folder: Path, kind: str, chat: str | None = None, seed: int = 0) -> Path:
    """Write a model folder of this architecture; ``chat``: its chat template."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIGS[kind]).save_pretrained(folder)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(["<bos>", "<eos>", *letters])}, merges=[]
        )
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>"
    )
    tokenizer.chat_template = chat
    tokenizer.save_pretrained(folder)
    return folder
