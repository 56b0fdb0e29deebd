"""Two equal runs on the device: equal in every bit, or what is not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from gpu.check import Check, holds
from gpu.ground import Ground
from gpu.models import model, random_prompts, sampled
from gpu.objective import Recorder, surrogate
from gpu.runs import differing, once
from rlflow.backends.local import Generator
from rlflow.training.protocols import ModelSpec


def checks(ground: Ground) -> Iterator[Check]:
    for dtype in ("bfloat16",) if ground.small else ("float32", "bfloat16"):
        one, other = (once(ground, "grpo", ground.device, dtype) for _ in range(2))
        yield holds(
            f"two iterations sample the same tokens, {dtype}",
            torch.equal(one.tokens, other.tokens),
            "other tokens",
        )
        yield holds(
            f"with the same log-probs, {dtype}", torch.equal(one.logprobs, other.logprobs), "other bits"
        )
        yield holds(
            f"and end with the same weights, {dtype}",
            not (names := differing(one.parameters, other.parameters)),
            told(names),
        )
    yield from passes(ground)


def passes(ground: Ground) -> Iterator[Check]:
    """A wide model and longer rows, whose attention is another kernel's."""
    folder = model(ground, "wide")
    generator = Generator(ModelSpec(folder, device=ground.device, dtype="bfloat16"))
    batch = random_prompts(ground.rows(3, 16), 8, ground.rows(12, 200))
    rows, again = (sampled(generator, batch, 4, ground.rows(4, 128)) for _ in range(2))
    yield holds(
        "wide rows are sampled alike",
        torch.equal(rows.data["tokens"].value, again.data["tokens"].value),
        "other tokens",
    )
    del generator
    for dtype in ("bfloat16",) if ground.small else ("bfloat16", "float32"):
        trainer = Recorder(ModelSpec(folder, trained=True, device=ground.device, dtype=dtype))
        (first, mine), (second, theirs) = (learned(trainer, rows) for _ in range(2))
        yield holds(f"wide forward passes are equal, {dtype}", torch.equal(first, second), "other bits")
        yield holds(
            f"wide gradients are equal, {dtype}",
            not (names := differing(mine, theirs)),
            f"{told(names)}{unsure(trainer, rows)}",
        )
        del trainer, mine, theirs
        ground.free()


def learned(trainer: Recorder, rows: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = trainer.forward(rows).data["logprobs"].value
    trainer.update(rows, surrogate)
    return logprobs, trainer.gradients


def unsure(trainer: Recorder, rows: Any) -> str:
    """Which operations PyTorch itself does not promise to repeat."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            learned(trainer, rows)
    finally:
        torch.use_deterministic_algorithms(False)
    said = {
        str(warning.message).partition(", but you set")[0].partition(". ")[0]
        for warning in told
        if "determin" in str(warning.message)
    }
    # which repeats itself on one stream
    return "".join(f"; {line}" for line in sorted(said) if "CuBLAS" not in line)


def told(names: list[str]) -> str:
    return f"{len(names)} tensors differ, first {names[0].removeprefix('parameters/')}" if names else ""
