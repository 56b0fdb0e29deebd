"""Check that sleep frees the device's memory, and that wake restores the weights bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu.check import Check, at_least, at_most, holds, untested
from gpu.ground import Ground
from gpu.models import model, random_prompts, sampled
from gpu.objective import surrogate
from rlflow.backends.local import Generator, Trainer
from rlflow.training.protocols import ModelSpec, Sampling

MIB = 2**20


def checks(ground: Ground) -> Iterator[Check]:
    folder = model(ground, "wide")
    batch = random_prompts(2, 3, 6)
    generator = Generator(ModelSpec(folder, device=ground.device, dtype="bfloat16"))
    rows = sampled(generator, batch, 2, 4)
    yield from freed(ground, "generator", generator, {"weights": weights(generator)})
    again = generator.generate(batch, Sampling(2, 4), range(4))
    yield holds(
        "a generator samples the same tokens after sleep and wake",
        torch.equal(again.data["tokens"].value, rows.data["tokens"].value),
    )
    del generator
    trainer = Trainer(ModelSpec(folder, trained=True, device=ground.device, dtype="bfloat16"))
    trainer.update(rows, surrogate)
    before = {name: tensor.detach().cpu().clone() for name, tensor in trainer.state().items()}
    yield from freed(
        ground, "trainer", trainer, {"weights": weights(trainer), "optimizer": 2 * weights(trainer)}
    )
    after = trainer.state()
    yield holds(
        "a trainer has the same state after sleep and wake",
        all(torch.equal(before[name], after[name].cpu()) for name in before),
    )
    trainer.update(rows, surrogate)
    yield holds("the trainer continues to train", trainer.steps == 2)
    if not ground.gpu:
        yield untested("freed memory", "memory is measured only on a GPU")


def weights(side: Any) -> int:
    """Return the total bytes of the weights."""
    return sum(tensor.nbytes for _, tensor in side.network.tensors())


def freed(ground: Ground, name: str, side: Any, parts: dict[str, int]) -> Iterator[Check]:
    """Let each part sleep, then wake all parts. Check how much memory each step frees or uses.

    ``parts``: the bytes of each part.
    """
    ground.free()
    whole = ground.allocated()
    for part, size in parts.items():
        before = ground.allocated()
        side.sleep(part)
        if ground.gpu:
            yield at_least(
                f"{name}: sleep frees its {part}",
                (before - ground.allocated()) / MIB,
                0.99 * size / MIB,
                "MiB",
            )
    side.wake(*parts)
    if ground.gpu:
        yield at_most(
            f"{name}: memory after wake minus memory before sleep",
            (ground.allocated() - whole) / MIB,
            4.0,
            "MiB",
        )
