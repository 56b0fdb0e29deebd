"""A small model, prompts and a reward, with which systems are compared that sample responses of one length.

    python fixed_shape.py FOLDER

The model is Qwen3-shaped with 0.8M random parameters.
"""

import inspect
import json
import random
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

import rlflow.tasks

PROMPTS = 960  # enough for 120 iterations of 8


def digits(completion: str) -> float:
    """The reward: the share of digits."""
    return sum(letter in "0123456789" for letter in completion) / max(len(completion), 1)


def make(folder: Path) -> None:
    """Write model, data.jsonl and reward.py."""
    packaged = Path(next(iter(rlflow.tasks.__path__))) / "arithmetic_model"
    tokenizer = AutoTokenizer.from_pretrained(packaged, local_files_only=True, trust_remote_code=False)
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                         num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
                         eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, trust_remote_code=False).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    draw = random.Random(0)
    lines = [{"prompt": f"Add {draw.randrange(1000)}, {draw.randrange(1000)} and {draw.randrange(1000)} ="} for _ in range(PROMPTS)]
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reward.py").write_text(inspect.getsource(digits))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
