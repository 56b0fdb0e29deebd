"""Check that two equal runs on the device give bit-for-bit identical results, and report any differences."""

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
            "different tokens",
        )
        yield holds(
            f"with the same log-probs, {dtype}", torch.equal(one.logprobs, other.logprobs), "different bits"
        )
        yield holds(
            f"and end with the same weights, {dtype}",
            not (names := differing(one.parameters, other.parameters)),
            difference_text(names),
        )
    yield from passes(ground)


def passes(ground: Ground) -> Iterator[Check]:
    """Repeat the passes of a wide model on longer rows, which use another attention kernel."""
    folder = model(ground, "wide")
    generator = Generator(ModelSpec(folder, device=ground.device, dtype="bfloat16"))
    batch = random_prompts(ground.rows(3, 16), 8, ground.rows(12, 200))
    rows, again = (sampled(generator, batch, 4, ground.rows(4, 128)) for _ in range(2))
    yield holds(
        "the wide model samples the same tokens twice",
        torch.equal(rows.data["tokens"].value, again.data["tokens"].value),
        "different tokens",
    )
    del generator
    for dtype in ("bfloat16",) if ground.small else ("bfloat16", "float32"):
        trainer = Recorder(ModelSpec(folder, trained=True, device=ground.device, dtype=dtype))
        (first, mine), (second, theirs) = (learned(trainer, rows) for _ in range(2))
        yield holds(
            f"forward passes of the wide model are equal, {dtype}",
            torch.equal(first, second),
            "different bits",
        )
        yield holds(
            f"gradients of the wide model are equal, {dtype}",
            not (names := differing(mine, theirs)),
            f"{difference_text(names)}{unsure(trainer, rows)}",
        )
        del trainer, mine, theirs
        ground.free()


def learned(trainer: Recorder, rows: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the log-probs and gradients of an update."""
    logprobs = trainer.forward(rows).data["logprobs"].value
    trainer.update(rows, surrogate)
    return logprobs, trainer.gradients


def unsure(trainer: Recorder, rows: Any) -> str:
    """Return the operations that PyTorch itself reports as non-deterministic in an update."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            learned(trainer, rows)
    finally:
        torch.use_deterministic_algorithms(False)
    messages = {
        str(warning.message).partition(", but you set")[0].partition(". ")[0]
        for warning in caught
        if "determin" in str(warning.message)
    }
    # cuBLAS is deterministic on one stream
    return "".join(f"; {line}" for line in sorted(messages) if "CuBLAS" not in line)


def difference_text(names: list[str]) -> str:
    """Return a string that says how many tensors differ. ``names``: names of these tensors."""
    return f"{len(names)} tensors differ, first {names[0].removeprefix('parameters/')}" if names else ""
