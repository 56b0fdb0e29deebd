"""Train with adapters, and with recomputed layers (gradient checkpointing)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from gpu.check import Check, at_most, holds, measured, untested
from gpu.ground import Ground
from gpu.models import PACKAGED, model, prompts, random_prompts, relative, sampled
from gpu.objective import Recorder, flat, surrogate
from rlflow.backends.local import Generator, Trainer
from rlflow.training.protocols import ModelSpec

LIMIT = 1e-4


def checks(ground: Ground) -> Iterator[Check]:
    yield from recomputed(ground)
    if importlib.util.find_spec("peft") is None:
        yield untested("adapters", "not installed: peft")
        return
    rows = sampled(Generator(ModelSpec(PACKAGED)), prompts(ground.rows(4, 32)), 2, 8)
    for dtype in ("float32",) if ground.small else ("float32", "bfloat16"):
        here, there = (adapted(device, dtype, rows) for device in ("cpu", ground.device))
        off = relative(flat(there), flat(here))
        yield (
            at_most("merged adapters after two updates", off, LIMIT)
            if dtype == "float32"
            else measured("merged adapters after two updates, bfloat16", off)
        )


def adapted(device: str, dtype: str, rows: Any) -> dict[str, Any]:
    """Make two updates of adapters, send the merged weights to a generator, and return them."""
    trainer = Trainer(
        ModelSpec(PACKAGED, trained=True, device=device, dtype=dtype), Trainer.Settings(lr=1e-3, lora=8)
    )
    for _ in range(2):
        trainer.update(rows, surrogate)
    Generator(ModelSpec(PACKAGED, device=device, dtype=dtype)).receive(trainer.weights(), 2)
    return {name: tensor.detach().cpu() for name, tensor in trainer.weights()}


def recomputed(ground: Ground) -> Iterator[Check]:
    """Check that recomputing layers gives the same gradient with less memory."""
    folder = model(ground, "wide")
    rows = sampled(
        Generator(ModelSpec(folder, device=ground.device)),
        random_prompts(ground.rows(2, 16), 4, ground.rows(6, 256)),
        2,
        ground.rows(4, 128),
    )
    gradients, peaks = [], []
    for settings in (Trainer.Settings(), Trainer.Settings(gradient_checkpointing=True)):
        trainer = Recorder(ModelSpec(folder, trained=True, device=ground.device), settings)
        before = ground.allocated()
        peaks.append(ground.peak(lambda trainer=trainer: trainer.update(rows, surrogate)) - before)
        gradients.append(flat(trainer.gradients))
        del trainer
        ground.free()
    yield at_most("gradient with recomputed layers", relative(gradients[1], gradients[0]), 1e-6)
    if ground.gpu:
        yield holds(
            "recomputed layers take less memory", peaks[1] < peaks[0], f"{peaks[1]} bytes, without {peaks[0]}"
        )
        yield measured("peak with recomputed layers ÷ peak without", peaks[1] / peaks[0])
