"""Plain Hugging Face calls: the minimum cost of a GRPO iteration in one process.

An iteration is a call of ``generate``, a forward pass, a backward pass and an AdamW step, without reward,
advantages or records.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from _lengths import Recorded, ends_of  # type: ignore[import-not-found]
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


class System:
    """The system that makes plain Hugging Face calls.

    ``cell["flags"]``: model, data, prompts, samples, lengths (a file of the suite), lr, iterations; dtype
    (default float32); weights (dtype of weights and moments, default ``dtype``; if it differs from ``dtype``,
    autocast computes in ``dtype``); rows (rows per forward and backward pass, default all rows of an
    iteration).
    """

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Load the model and the prompts, and return facts about the system."""
        self.flags, self.number = cell["flags"], 0
        torch.manual_seed(seed)
        source, self.dtype = self.flags["model"], getattr(torch, self.flags.get("dtype", "float32"))
        weights = getattr(torch, self.flags["weights"]) if "weights" in self.flags else self.dtype
        self.model = AutoModelForCausalLM.from_pretrained(
            source, dtype=weights, local_files_only=True, trust_remote_code=False
        )
        self.tokenizer = AutoTokenizer.from_pretrained(
            source, padding_side="left", local_files_only=True, trust_remote_code=False
        )
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.flags["lr"], weight_decay=0.0, fused=True
        )
        self.lengths = Recorded(self.flags["lengths"], ends_of(self.model, self.tokenizer))
        self.texts = [
            json.loads(line)["prompt"] for line in Path(self.flags["data"]).read_text().splitlines()
        ]
        return {"iterations": self.flags["iterations"], "threads": torch.get_num_threads()}

    def iterate(self, count: int) -> dict[str, Any]:
        """Run the next iterations. Returns their wall seconds and numbers of sampled tokens."""
        rows = []
        for _ in range(min(count, self.flags["iterations"] - self.number)):
            start = time.perf_counter()
            tokens = self.step(self.number)
            rows.append(
                {
                    "iteration": self.number,
                    "wall": time.perf_counter() - start,
                    "tokens": tokens,
                    "metrics": {},
                }
            )
            self.number += 1
        return {"iterations": rows, "evaluations": [], "ended": self.number == self.flags["iterations"]}

    def step(self, number: int) -> int:
        """Run one iteration, and return the number of sampled tokens."""
        prompts = self.flags["prompts"]
        first = number * prompts % len(self.texts)
        batch = [text for text in self.texts[first : first + prompts] for _ in range(self.flags["samples"])]
        inputs = self.tokenizer(batch, return_tensors="pt", padding=True)
        width, lengths = inputs.input_ids.shape[1], self.lengths.take(len(batch))
        with self.precision():
            ids = self.model.generate(
                **inputs,
                do_sample=True,
                top_k=0,
                max_new_tokens=int(lengths.max()),
                logits_processor=self.lengths.processors(lengths, width),
            )
        own = torch.arange(ids.shape[1] - width) < lengths[:, None]
        mask, rewards = torch.cat([inputs.attention_mask, own.long()], 1), torch.randn(len(ids), 1)
        for rows in torch.split(torch.arange(len(ids)), self.flags.get("rows", len(ids))):
            self.backward(ids[rows], mask[rows], own[rows], rewards[rows], int(own.sum()))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return int(own.sum())

    def backward(self, ids: Tensor, mask: Tensor, own: Tensor, rewards: Tensor, tokens: int) -> None:
        """Run the forward and backward pass for a part of the rows.

        ``ids``, ``mask``: [rows, prompt and response]. ``own``: [rows, response]. ``rewards``: [rows, 1].
        ``tokens``: number of response tokens in the complete iteration.
        """
        with self.precision():
            logits = self.model(ids, attention_mask=mask, logits_to_keep=own.shape[1] + 1).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, -own.shape[1] :, None])[..., 0]
        (-(logprobs * rewards)[own].sum() / tokens).backward()

    def precision(self) -> contextlib.AbstractContextManager[None]:
        """Return the autocast context. It has no effect if the weights have the dtype of the computation."""
        return (
            contextlib.nullcontext() if self.model.dtype is self.dtype else torch.autocast("cpu", self.dtype)
        )

    def observe(self) -> dict[str, Any]:
        """Return an empty dict, since this system adds no measurements of its own."""
        return {}

    def close(self) -> None:
        """Do nothing: the system starts no processes."""
