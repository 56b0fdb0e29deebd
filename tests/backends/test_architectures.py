"""Architectures beyond the quick tests: scaled logits, caches other than attention, experts, no positions."""

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, CohereConfig, GraniteConfig, MambaConfig, OpenAIGPTConfig

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.backends.local import Generator, Trainer, network
from rlflow.backends.local.tokenizer import copy_tokenizer
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec, Sampling

PROMPTS = Batch.of(prompt_tokens=[[5, 6, 7], [8], list(range(5, 40)), [9, 9]])
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ARCHITECTURES = {
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},  # learned positions
    "Bloom": {"n_layer": 2, "n_head": 4},  # no position_ids: attention biases
    "GPTNeoX": {},
    "Mistral": {"sliding_window": 8},  # every layer has a sliding window
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": EXPERTS,
    "Qwen3Next": EXPERTS
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 16,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    # attention sinks
    "GptOss": {
        "num_local_experts": 4,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Glm4": {},
    "Olmo2": {},
}


@loss
def likelihood(new, mask):
    return -new.logprobs, {}


def saved(config, folder, tokenizer):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    copy_tokenizer(tokenizer, folder)
    return folder


def agree(folder):
    """Check that sampling, the trainer and a plain forward agree, and that the model trains."""
    trainer, generator = Trainer(ModelSpec(folder, trained=True)), Generator(ModelSpec(folder))
    generator.receive(trainer.weights(), 1)
    batch = generator.generate(PROMPTS, Sampling(samples=6, max_tokens=24), range(24)) | PROMPTS
    got = trainer.forward(batch)
    torch.testing.assert_close(got["logprobs"], batch["sampled_logprobs"], atol=1e-5, rtol=0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for i in range(0, 24, 5):
        row = batch.rows([i])
        prompt, tokens = row["prompt_tokens"][0], row["tokens"][0]
        logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        torch.testing.assert_close(got["logprobs"][i, : len(tokens)], expected.detach(), atol=1e-5, rtol=0)
    assert trainer.update(batch, likelihood)["steps"] == 1


@pytest.mark.parametrize(
    ("kind", "scaling"), [(CohereConfig, {"logit_scale": 0.3}), (GraniteConfig, {"logits_scaling": 4.0})]
)
def test_scaled_logits_are_sampled_and_trained(folders, tmp_path, kind, scaling):
    agree(saved(kind(**SMALL, **scaling), tmp_path, folders["gpt2"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sampling_training_and_a_plain_forward_agree(folders, tmp_path, name):
    config = getattr(transformers, f"{name}Config")(**SMALL | ARCHITECTURES[name])
    agree(saved(config, tmp_path, folders["gpt2"]))


def test_an_unknown_change_of_logits_is_refused(folders, monkeypatch):
    monkeypatch.setattr(network, "_candidates", lambda config: iter([lambda logits: logits]))
    with pytest.raises(PlanError, match="Gemma2ForCausalLM transforms its logits in an unknown way"):
        Trainer(ModelSpec(folders["gemma2"]))


def test_a_model_without_a_cache_is_refused(folders, tmp_path):
    config = OpenAIGPTConfig(vocab_size=64, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(PlanError, match=r"no key-value cache(.|\n)*remedy: +--ROLE.generator vllm"):
        Generator(ModelSpec(saved(config, tmp_path, folders["gpt2"])))


def test_a_model_whose_cache_changes_its_numbers_is_refused(folders, tmp_path):
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=8)
    with pytest.raises(PlanError, match=r"key-value cache(.|\n)*remedy: +--ROLE.generator vllm"):
        Generator(ModelSpec(saved(config, tmp_path, folders["gpt2"])))
