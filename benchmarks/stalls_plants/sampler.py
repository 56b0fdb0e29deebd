"""A backend for `benchmarks/stalls.py` whose Generator samples with stale or noisy weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlflow.author.batch import Batch
from rlflow.backends.local.generator import Generator as LocalGenerator
from rlflow.backends.local.settings import GeneratorSettings
from rlflow.training.protocols import ModelSpec, Sampling


class Generator(LocalGenerator):
    """The local Generator, changed to sample with other weights than those it received."""

    @dataclass(frozen=True)
    class Settings(GeneratorSettings):
        every: int = 1  # use new weights only after this many updates; 0: never
        # standard deviation of a fixed, normally distributed error on each weight, relative to the weight
        noise: float = 0.0

    settings: Any

    def __init__(self, spec: ModelSpec, settings: Any = None) -> None:
        super().__init__(spec, settings or self.Settings())
        self.sampling = copy.deepcopy(self.network)
        self.taken = -1

    def generate(self, prompts: Batch, sampling: Sampling, seeds: Sequence[int]) -> Batch:
        every = self.settings.every
        due = self.taken < 0 or (every > 0 and self.version // every > self.taken // every)
        if due:
            self.taken = self.version
            self.sampling.copy(self._weights())
        right, self.network = self.network, self.sampling
        try:
            return super().generate(prompts, sampling, seeds)
        finally:
            self.network = right

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        rng = torch.Generator().manual_seed(0)
        for name, tensor in self.network.tensors():
            off = torch.randn(tensor.shape, generator=rng, dtype=torch.float32).to(tensor.dtype)
            yield name, tensor * (1 + self.settings.noise * off)
