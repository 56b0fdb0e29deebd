"""Write a small model, prompts and a reward, to compare systems with responses of equal lengths.

    python fixed_shape.py FOLDER

The model is a Qwen3 with 0.8M random parameters. Prompts are short (data.jsonl) or have about 190 tokens
(long.jsonl). lengths.json has response lengths that were recorded from a real model; the original is in this
script's folder. fixed.json gives every response 64 tokens.
"""

import inspect
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

import rlflow.data.tasks

PROMPTS = 960  # enough prompts for 120 iterations with 8 prompts each
LONG = 190  # approximate tokens of a long prompt
FIXED = 64  # tokens of each response of fixed.json
LENGTHS = Path(__file__).with_name("lengths.json")


def digits(completion: str, answer: str = "") -> float:
    """Return the reward: the share of digits in the completion. ``answer`` is ignored."""
    return sum(letter in "0123456789" for letter in completion) / max(len(completion), 1)


def long_prompt(draw: random.Random, tokenizer: Any) -> str:
    """Return a sum with enough numbers for about LONG tokens of text."""
    numbers, wanted = [f"{draw.randrange(1000)}"], draw.randint(LONG - 20, LONG + 20)
    # a token has at least one character, so check the number of characters first, which is cheap
    while len(text := f"Add {', '.join(numbers)} =") < wanted or len(tokenizer(text).input_ids) < wanted:
        numbers.append(f"{draw.randrange(1000)}")
    return text


def make(folder: Path) -> None:
    """Write model, data.jsonl, long.jsonl, lengths.json, fixed.json and reward.py."""
    packaged = Path(next(iter(rlflow.data.tasks.__path__))) / "arithmetic_model"
    tokenizer = AutoTokenizer.from_pretrained(packaged, local_files_only=True, trust_remote_code=False)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(0)
    lines = [
        {"prompt": f"Add {draw.randrange(1000)}, {draw.randrange(1000)} and {draw.randrange(1000)} ="}
        for _ in range(PROMPTS)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    long = [{"prompt": long_prompt(draw, tokenizer)} for _ in range(PROMPTS)]
    (folder / "long.jsonl").write_text("".join(json.dumps(line) + "\n" for line in long))
    (folder / LENGTHS.name).write_bytes(LENGTHS.read_bytes())
    (folder / "fixed.json").write_text(
        json.dumps({"source": "every response as long as the longest", "lengths": [FIXED]})
    )
    (folder / "reward.py").write_text(inspect.getsource(digits))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
