"""The floor of an iteration of GRPO in one process: bare Hugging Face calls. ``generate``, one forward, one backward and one AdamW step,
with nothing around them: no reward, no advantages, no records."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


class System:
    """``cell["flags"]``: model, data, prompts, samples, tokens, lr, iterations."""

    def prepare(self, cell: dict[str, Any], folder: str, seed: int) -> dict[str, Any]:
        """Load the model and the prompts."""
        self.flags, self.number = cell["flags"], 0
        torch.manual_seed(seed)
        source = self.flags["model"]
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True, trust_remote_code=False)
        self.tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left", local_files_only=True, trust_remote_code=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.flags["lr"], weight_decay=0.0, fused=True)
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
        prompts, length = self.flags["prompts"], self.flags["tokens"]
        first = number * prompts % len(self.texts)
        batch = [text for text in self.texts[first : first + prompts] for _ in range(self.flags["samples"])]
        inputs = self.tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=False)
        width = inputs.input_ids.shape[1]
        ids = self.model.generate(**inputs, do_sample=True, top_k=0, min_new_tokens=length, max_new_tokens=length)
        mask = torch.nn.functional.pad(inputs.attention_mask, (0, ids.shape[1] - width), value=1)
        logits = self.model(ids, attention_mask=mask, logits_to_keep=length + 1).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, width:, None])[..., 0]
        loss = -(logprobs * torch.randn(len(ids), 1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return int((ids.shape[1] - width) * len(ids))

    def observe(self) -> dict[str, Any]:
        """Nothing beside what every cell is measured by."""
        return {}

    def close(self) -> None:
        """Nothing was started."""
