"""Small random models of real architectures, saved as Hugging Face folders with a tokenizer of single characters."""

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

CHARACTERS = " abcdefghijklmnopqrstuvwxyz0123456789+-*/=().,:;!?<>[]{}#"
VOCABULARY = 64
EOS = 1

SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "eos_token_id": EOS, "pad_token_id": EOS,
         "bos_token_id": 2, "initializer_range": 0.1}
GPT2 = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, eos_token_id=EOS, bos_token_id=2,
                  pad_token_id=EOS, initializer_range=0.1)
CONFIGS = {
    "gpt2": GPT2,
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "gemma3": Gemma3TextConfig(**SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "gemma2": Gemma2Config(**SMALL, final_logit_softcapping=3.0, sliding_window=8),
}


def tokenizer():
    vocabulary = {"<unk>": 0, "<eos>": EOS, "<bos>": 2} | {c: i + 3 for i, c in enumerate(CHARACTERS)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>", bos_token="<bos>", pad_token="<eos>")


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Shape → model folder. ``reward`` is a Llama with a score head."""
    root = tmp_path_factory.mktemp("models")
    for seed, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        tokenizer().save_pretrained(root / name)
    torch.manual_seed(99)
    AutoModelForSequenceClassification.from_config(LlamaConfig(**SMALL, num_labels=1)).save_pretrained(root / "reward")
    tokenizer().save_pretrained(root / "reward")
    return {path.name: path for path in root.iterdir()}
