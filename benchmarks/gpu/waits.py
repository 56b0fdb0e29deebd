"""Count how often the decode loop waits for the device.

Also check that waiting once per block of tokens samples the same tokens as waiting after each token.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Qwen3Config

from gpu.check import Check, at_most, holds, untested
from gpu.ground import Ground
from gpu.models import random_prompts, saved
from rlflow.backends.local import Generator, decode, generator
from rlflow.training.protocols import ModelSpec, Sampling

SMALL = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "bos_token_id": 2,
}
SHAPES: dict[str, Any] = {
    "Qwen3": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "Llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "GPT-2": GPT2Config(
        vocab_size=512, n_embd=64, n_layer=2, n_head=2, eos_token_id=1, bos_token_id=2, pad_token_id=1
    ),
    "Gemma 3": Gemma3TextConfig(
        **SMALL, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
}
TOKENS = 96
# number of waits in a batch that does not depend on the number of tokens: random numbers, ends of rows
ONCE = 8


def checks(ground: Ground) -> Iterator[Check]:
    batch = random_prompts(ground.rows(4, 32), 3, 40)
    for name, config in SHAPES.items():
        one = Generator(ModelSpec(saved(ground.folder / f"waits-{name}", config), device=ground.device))
        tokens = ground.rows(20, TOKENS)
        blocks, each = (sampled(one, batch, tokens, block) for block in (decode.BLOCK, 1))
        yield holds(
            f"{name}: the same tokens with blocks and without", torch.equal(blocks, each), "different tokens"
        )
        if ground.gpu:
            found = waits(lambda: one.generate(batch, Sampling(4, TOKENS), range(4 * len(batch))))  # noqa: B023 - it is called at once
            places = ", ".join(f"{place} × {count}" for place, count in found.most_common(3))
            yield at_most(
                f"{name}: waits for {TOKENS} tokens",
                sum(found.values()),
                TOKENS / decode.BLOCK + ONCE,
                why=places,
            )
    if not ground.gpu:
        yield untested("waits for the device", "a CPU computes synchronously")


def sampled(one: Generator, batch: Any, tokens: int, block: int) -> torch.Tensor:
    """Sample tokens with a decode loop that waits for the device once per ``block`` tokens."""
    before = generator.block_of
    generator.block_of = lambda device: block
    try:
        return one.generate(batch, Sampling(2, tokens), range(2 * len(batch))).data["tokens"].value
    finally:
        generator.block_of = before


def waits(call: Callable[[], object]) -> Counter[str]:
    """Make a call twice, and count where the second call waits for the device.

    Returns the number of waits at each place in the source.
    """
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return Counter(
        f"{Path(warning.filename).name}:{warning.lineno}"
        for warning in caught
        if "synchroniz" in str(warning.message)
    )
