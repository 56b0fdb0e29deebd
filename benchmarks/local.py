"""Measure the time of the parts of an iteration on the local backend: medians of alternating calls.

    python benchmarks/local.py [--pairs 10] [--threads 2]

The model has 0.8M parameters. An iteration has 8 prompts × 8 samples × 64 tokens (`rlflow bench
peers_fixed`). Seconds are wall time, followed by CPU time in brackets, which is more reliable on a busy
machine.

1. sampling, log-probs and update, each alone; and only their matrix products
2. log-probs followed by an update, compared with an update that reuses the forward pass of the log-probs
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.backends.local import Generator, Trainer
from rlflow.benchmarks.suites.fixed_shape import make
from rlflow.training.protocols import ModelSpec, Sampling

PROMPTS, SAMPLES, TOKENS = 8, 8, 64

Call = Callable[[], object]


@loss
def surrogate(new, logprobs):
    return -(new.logprobs - logprobs).exp(), {}


def times(pairs: int, *calls: Call) -> list[str]:
    """Alternate calls, and return the median wall and CPU seconds of each as text.

    The first two rounds are a warm-up.
    """
    found: list[list[tuple[float, float]]] = [[] for _ in calls]
    for turn in range(pairs + 2):
        for number in range(len(calls)):
            index = (number + turn) % len(calls)
            wall, processor = time.perf_counter(), time.process_time()
            calls[index]()
            if turn >= 2:
                found[index].append((time.perf_counter() - wall, time.process_time() - processor))
    return [
        "{:.4f} s ({:.4f} s)".format(*(statistics.median(column) for column in zip(*each, strict=True)))
        for each in found
    ]


class Parts:
    """A trainer, a generator, and rows sampled by the generator."""

    def __init__(self, folder: Path) -> None:
        make(folder)
        lines = [
            json.loads(line)["prompt"] for line in (folder / "data.jsonl").read_text().splitlines()[:PROMPTS]
        ]
        self.generator = Generator(ModelSpec(folder / "model"))
        self.trainer = Trainer(ModelSpec(folder / "model", trained=True))
        self.prompts = Batch.of(
            prompt_tokens=self.generator.tokenizer(lines, add_special_tokens=False).input_ids
        )
        rows = self.generate()
        self.rows = rows | Batch(
            rows.axis,
            {"prompt_tokens": self.prompts.data["prompt_tokens"].take(rows.axis.index, self.prompts.axis)},
        )
        self.scored = self.rows | self.trainer.forward(self.rows)

    def generate(self) -> Batch:
        return self.generator.generate(
            self.prompts, Sampling(SAMPLES, TOKENS, min_tokens=TOKENS), range(PROMPTS * SAMPLES)
        )

    def update(self) -> None:
        self.trainer.update(self.scored, surrogate)

    def separate(self) -> None:
        """Compute log-probs, then update with a second forward pass."""
        self.trainer.update(self.rows | self.trainer.forward(self.rows), surrogate)

    def reusing(self) -> None:
        """Compute log-probs, then update with the same forward pass."""
        self.trainer.update(self.rows | self.trainer.forward_ahead(self.rows), surrogate)

    def products(self, tokens: int, times: int) -> Call:
        """Return a function that multiplies the model's weights with ``tokens`` vectors, ``times`` times."""
        weights = [p.detach() for p in self.trainer.network.parameters().values() if p.dim() == 2]
        inputs = {p.shape[1]: torch.randn(tokens, p.shape[1]) for p in weights}
        return lambda: [
            torch.nn.functional.linear(inputs[p.shape[1]], p) for _ in range(times) for p in weights
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(f"torch {torch.__version__}, {given.threads} threads, {given.pairs} rounds")
    with tempfile.TemporaryDirectory() as folder:
        parts = Parts(Path(folder))
        tokens = int(parts.rows.data["tokens"].lengths.sum() + parts.rows.data["prompt_tokens"].lengths.sum())
        named: dict[str, Call] = {
            "sampling": parts.generate,
            "its matrix products": parts.products(PROMPTS * SAMPLES, TOKENS),
            "log-probs": lambda: parts.trainer.forward(parts.rows),
            "update": parts.update,
            "its matrix products, forward and backward": parts.products(tokens, 3),
            "log-probs, then the update": parts.separate,
            "log-probs, and an update that reuses their forward pass": parts.reusing,
        }
        for name, took in zip(named, times(given.pairs, *named.values()), strict=True):
            print(f"{name}: {took}", flush=True)


if __name__ == "__main__":
    main()
