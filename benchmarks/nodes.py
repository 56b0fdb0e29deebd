"""Profile an iteration of a real model: seconds of each node, and the torch operators with the most CPU time.

    python benchmarks/nodes.py [--model gemma|qwen3-0.6b] [--algorithm grpo] [--dtype float32] [--prompts 8]
                               [--samples 8] [--tokens 12]

gemma is Gemma 3 270M as in `rlflow bench gemma_calls`, with prompts of about 47 tokens that ask for sums.
qwen3-0.6b has the sizes of Qwen3 0.6B, random weights, and the prompts of `rlflow bench peers_fixed`.

The run has two iterations with one AdamW step each. All responses have the same length. Seconds are the mean
of both iterations, without loading, but with the memory allocation of the first step. The second table shows
the 12 operators with the most CPU seconds, and their share of the total. torch's profiler slows the run a
little and takes minutes after it; --operators 0 disables it. --lora RANK trains adapters instead of all
weights. PPO of all weights of Qwen3 0.6B needs more than 24 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, Qwen3Config

import rlflow
from rlflow.benchmarks.suites import fixed_shape, gemma
from rlflow.training import pretrained

QWEN = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def qwen(folder: Path) -> Path:
    """Write prompts, and a model with the sizes of Qwen3 0.6B and random weights.

    Returns the file of prompts.
    """
    fixed_shape.make(folder)
    tokenizer = pretrained.read_tokenizer(folder / "model")
    config = Qwen3Config(
        **QWEN, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    pretrained.empty_model(AutoModelForCausalLM, config, torch.bfloat16).save_pretrained(folder / "model")
    return folder / "data.jsonl"


@contextlib.contextmanager
def operators(count: int) -> Iterator[None]:
    """Profile the code inside the context, and print the ``count`` operators with the most CPU time.

    The time is summed over all threads.
    """
    if not count:
        yield
        return
    with profile(
        activities=[ProfilerActivity.CPU], experimental_config=_ExperimentalConfig(profile_all_threads=True)
    ) as seen:
        yield
    averages = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)
    whole = sum(event.self_cpu_time_total for event in averages)
    print("| operator | calls | seconds | share |\n| --- | ---: | ---: | ---: |")
    for event in averages[:count]:
        print(
            f"| `{event.key}` | {event.count} | {event.self_cpu_time_total / 1e6:.2f} | "
            f"{event.self_cpu_time_total / whole:.0%} |"
        )


def nodes(folder: Path) -> None:
    """Print the seconds of each node in an iteration. ``folder``: the run's folder."""
    bounds = json.loads((folder / "bounds.json").read_text())
    print("| node | seconds per iteration |\n| --- | ---: |")
    for name, node in bounds["nodes"].items():
        print(f"| {name} | {node['seconds'] / bounds['iterations']:.2f} |")
    print(f"| all | {bounds['seconds']:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gemma", choices=["gemma", "qwen3-0.6b"])
    parser.add_argument("--algorithm", default="grpo", choices=["grpo", "ppo"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    for name, default in {"prompts": 8, "samples": 8, "tokens": 12, "operators": 12, "lora": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        if given.model == "gemma":
            gemma.make(folder)
            data = folder / "sums.jsonl"
        else:
            data = qwen(folder)
        (folder / "lengths.json").write_text(
            json.dumps({"source": "all of the same length", "lengths": [given.tokens]})
        )
        reward = "math" if given.model == "gemma" else f"{folder / 'reward.py'}:digits"
        flags: dict[str, Any] = {
            "model": str(folder / "model"),
            "data": str(data),
            "dtype": given.dtype,
            "reward": reward,
            "device": "cpu",
            "out": text,
            "iterations": 2,
            "held_out": 0,
            "save_every": 0,
            "prompts": given.prompts,
            "hp.samples": given.samples,
            "hp.epochs": 1,
            "hp.max_tokens": given.tokens,
            "hp.minibatch": given.prompts * given.samples,
            "actor.lr": 1e-6,
            "actor.generate.lengths": str(folder / "lengths.json"),
        }
        flags |= {
            f"{role}.lora": given.lora
            for role in (("actor", "critic") if given.algorithm == "ppo" else ("actor",))
        }
        with operators(given.operators):
            run = rlflow.run(given.algorithm, **flags)
        nodes(run.folder)


if __name__ == "__main__":
    main()
