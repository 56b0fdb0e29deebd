"""Measure memory peaks, and compare them with the bounds that ``micro_tokens`` and ``logit_tokens`` set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpu.check import Check, at_least, at_most, holds, measured, untested
from gpu.ground import Ground
from gpu.models import model, random_prompts, sampled
from gpu.objective import Recorder, flat, relative_gradient, surrogate
from rlflow.backends.local import Generator
from rlflow.backends.local.logprobs import ENTRIES
from rlflow.training.protocols import ModelSpec

# copies of one piece's logits that exist at once: five in the backward pass, and one for a kernel's workspace
COPIES = 6


def checks(ground: Ground) -> Iterator[Check]:
    folder = model(ground, "wide")
    generator = Generator(ModelSpec(folder, device=ground.device, dtype="bfloat16"))
    rows = sampled(
        generator, random_prompts(ground.rows(4, 32), 3, ground.rows(6, 192)), 2, ground.rows(6, 128)
    )
    del generator
    trainer = Recorder(ModelSpec(folder, trained=True, device=ground.device, dtype="bfloat16"))
    micro = {
        tokens: peak(ground, trainer, rows, micro_tokens=tokens)
        for tokens in ((8, 16, 32) if ground.small else (2048, 4096, 8192))
    }
    yield at_most("gradient in small micro-batches", relative_gradient(micro), 1e-2, why="of bfloat16")
    logits = {
        tokens: peak(ground, trainer, rows, logit_tokens=tokens)
        for tokens in ((2, 4, 8) if ground.small else (256, 1024, 4096))
    }
    yield at_most("gradient in small pieces of logits", relative_gradient(logits), 1e-2, why="of bfloat16")
    if not ground.gpu:
        yield untested("peaks", "memory is measured only on a GPU")
        return
    yield from grows("micro_tokens", {tokens: most for tokens, (most, _) in micro.items()})
    most = {tokens: most for tokens, (most, _) in logits.items()}
    few, some, many = most
    vocabulary = trainer.network.vocabulary
    yield measured(
        "bytes per token of logit_tokens ÷ bytes of its float32 logits",
        (most[many] - most[some]) / (many - some) / (4 * vocabulary),
    )
    yield at_most(
        f"peak with {many} logit_tokens minus peak with {some}",
        most[many] - most[some],
        COPIES * (many - some) * 4 * vocabulary,
        "bytes",
    )
    default, _ = peak(ground, trainer, rows)
    yield at_most(
        f"peak with logit_tokens 0 minus peak with {few}",
        default - most[few],
        COPIES * ENTRIES * 4,
        "bytes",
        why="each copy of the logits has at most 1 GiB",
    )


def grows(name: str, most: dict[int, int]) -> Iterator[Check]:
    """Check that the peak memory grows with a setting that is doubled twice.

    ``most``: the peak bytes for each value of the setting.
    """
    (few, some, many), (a, b, c) = most, most.values()
    yield measured(f"bytes per token of {name}", (c - b) / (many - some), "bytes")
    yield holds(f"the peak grows with {name}", a < b < c, f"{a}, {b}, {c} bytes with {few}, {some}, {many}")
    yield at_least(
        "growth of the second doubling ÷ growth of the first",
        (c - b) / max(b - a, 1),
        1.2,
        why="2 if the peak is proportional",
    )


def peak(ground: Ground, trainer: Recorder, rows: Any, **settings: int) -> tuple[int, Any]:
    """Run one update. Returns (peak bytes in addition to the memory used before, gradient)."""
    trainer.settings = replace(trainer.settings, **{"micro_tokens": 8192, "logit_tokens": 0, **settings})
    trainer.gradients = {}
    before = ground.allocated()
    most = ground.peak(lambda: trainer.update(rows, surrogate))
    return most - before, flat(trainer.gradients)
