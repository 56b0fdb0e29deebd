"""The floor of an iteration of GRPO in one process: bare Hugging Face calls. ``generate``, one forward, one backward and one AdamW step,
with nothing around them: no reward, no advantages, no records."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from _lengths import Recorded, ends_of  # type: ignore[import-not-found]
from transformers import AutoModelForCausalLM, AutoTokenizer


class System:
    """``cell["flags"]``: model, data, prompts, samples, lengths (a file of the suite), lr, iterations."""

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Load the model and the prompts."""
        self.flags, self.number = cell["flags"], 0
        torch.manual_seed(seed)
        source = self.flags["model"]
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
        self.tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", local_files_only=True, trust_remote_code=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.flags["lr"], weight_decay=0.0, fused=True)
        self.lengths = Recorded(self.flags["lengths"], ends_of(self.model, self.tokenizer))
        self.texts = [json.loads(line)["prompt"] for line in Path(self.flags["data"]).read_text().splitlines()]
        return {"iterations": self.flags["iterations"], "threads": torch.get_num_threads()}

    def iterate(self, count: int) -> dict[str, Any]:
        """The next iterations, with their wall seconds and sampled tokens."""
        rows = []
        for _ in range(min(count, self.flags["iterations"] - self.number)):
            start = time.perf_counter()
            tokens = self.step(self.number)
            rows.append({"iteration": self.number, "wall": time.perf_counter() - start, "tokens": tokens, "metrics": {}})
            self.number += 1
        return {"iterations": rows, "evaluations": [], "ended": self.number == self.flags["iterations"]}

    def step(self, number: int) -> int:
        """One iteration; the tokens that were sampled."""
        prompts = self.flags["prompts"]
        first = number * prompts % len(self.texts)
        batch = [text for text in self.texts[first : first + prompts] for _ in range(self.flags["samples"])]
        inputs = self.tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False)
        width, lengths = inputs.input_ids.shape[1], self.lengths.take(len(batch))
        ids = self.model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=int(lengths.max()),
                                  logits_processor=self.lengths.processors(lengths, width))
        own = torch.arange(ids.shape[1] - width) < lengths[:, None]
        mask = torch.cat([inputs.attention_mask, own.long()], 1)
        logits = self.model(ids, attention_mask=mask, logits_to_keep=own.shape[1] + 1).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, width:, None])[..., 0]
        loss = -(logprobs * torch.randn(len(ids), 1))[own].mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return int(own.sum())

    def observe(self) -> dict[str, Any]:
        """Nothing beside what every cell is measured by."""
        return {}

    def close(self) -> None:
        """Nothing was started."""
