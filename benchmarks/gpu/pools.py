"""Compare a run on a pool of Ray workers with the same run in one process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file

from gpu.check import Check, at_most, holds
from gpu.ground import Ground
from gpu.models import relative
from gpu.objective import flat
from gpu.runs import run

LIMIT = 1e-4


def checks(ground: Ground) -> Iterator[Check]:
    few: dict[str, Any] = {"prompts": ground.rows(2, 16), "iterations": 2, "hp.samples": 2}
    alone = final(run(ground, "grpo", ground.device, "float32", **few, name="alone"))
    pooled = run(ground, "grpo", ground.device, "float32", **few, name="pooled", pools="all=1")
    yield holds("a pool of one rank runs all its iterations", pooled.iterations == 2)
    yield at_most("weights on a pool of one rank against one process", relative(final(pooled), alone), LIMIT)


def final(ended: Any) -> torch.Tensor:
    """Return the actor's final weights of a run as one vector."""
    return flat(load_file(ended.folder / "final" / "actor" / "model.safetensors"))
