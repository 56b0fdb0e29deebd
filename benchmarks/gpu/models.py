"""Models and rows for the sections, and measures of the difference between tensors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from gpu.ground import ROOT, Ground
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import standard_kind
from rlflow.backends.local.read_model import quiet, unwrapped
from rlflow.backends.local.tokenizer import copy_tokenizer, load_tokenizer
from rlflow.training import pretrained
from rlflow.training.protocols import Sampling

PACKAGED = ROOT / "rlflow" / "data" / "tasks" / "arithmetic_model"
# the prompt format on which the packaged model was trained
QUESTION = "State the final answer to the following arithmetic problem: {} {} {} ="
SHAPES: dict[str, dict[str, int]] = {  # configurations of Qwen3 models; the first two are made up
    "small": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "vocab_size": 512,
    },
    "wide": {
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151936,
    },
    "1.7b": {
        "hidden_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 6144,
        "vocab_size": 151936,
    },
}


def model(ground: Ground, shape: str) -> Path:
    """Return the folder of a model with this shape and random weights. The first call creates the model.

    With small models, every shape has two layers.
    """
    own = SHAPES["small" if ground.small else shape]
    folder = ground.folder / f"qwen3-{shape}"
    config = Qwen3Config(
        **own,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    return folder if folder.exists() else saved(folder, config, ground.device)


def saved(folder: Path, config: Any, device: str = "cpu") -> Path:
    """Save a model with random bfloat16 weights and the packaged tokenizer, and return its folder."""
    torch.manual_seed(0)
    with torch.device(device):
        model = pretrained.empty_model(AutoModelForCausalLM, config, torch.bfloat16)
    with quiet(), unwrapped():
        model.save_pretrained(folder)
    copy_tokenizer(PACKAGED, folder)
    return folder


def questions(count: int, seed: int = 0) -> list[tuple[str, str]]:
    """Return ``count`` different sums and differences of two-digit numbers, as (question, answer)."""
    every = [(a, sign, b) for a in range(10, 100) for b in range(10, 100) for sign in "+-"]
    picked = random.Random(seed).sample(every, count)
    return [(QUESTION.format(a, sign, b), str(a + b if sign == "+" else a - b)) for a, sign, b in picked]


def prompts(count: int) -> Any:
    """Return a batch of ``count`` questions, tokenized for the packaged model."""
    texts = [question for question, _ in questions(count)]
    return Batch.of(
        prompt=texts, prompt_tokens=load_tokenizer(PACKAGED)(texts, add_special_tokens=False).input_ids
    )


def random_prompts(count: int, shortest: int, longest: int, vocabulary: int = 512) -> Any:
    """Return a batch of random prompts of ``shortest`` to ``longest`` tokens."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=draw).tolist()
    return Batch.of(
        prompt_tokens=[torch.randint(0, vocabulary, (length,), generator=draw) for length in lengths]
    )


def sampled(generator: Any, batch: Any, samples: int, tokens: int) -> Any:
    """Sample rows, and add log-probs and random advantages, the columns that a loss reads."""
    rows = generator.generate(batch, Sampling(samples, tokens), range(samples * len(batch)))
    draw = torch.Generator().manual_seed(1)
    tokens_each = rows.data["tokens"].lengths
    made = {
        "advantages": torch.randn(int(tokens_each.sum()), generator=draw),
        "logprobs": rows.data["sampled_logprobs"].value.float(),
    }
    columns = {name: Data(standard_kind(name), value, tokens_each) for name, value in made.items()}
    prompt = batch.data["prompt_tokens"].take(rows.axis.index, batch.axis)
    return rows | Batch(rows.axis, columns | {"prompt_tokens": prompt})


def relative(found: Tensor, expected: Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖, in float64 on the host."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-300))


def furthest(found: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference of entries, divided by the largest entry of ``expected``."""
    found, expected = found.detach().double().cpu(), expected.detach().double().cpu()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


@contextmanager
def rounded_products(allowed: bool) -> Iterator[None]:
    """Inside the context, allow or forbid TF32, which has ten mantissa bits, in float32 matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
