"""Check vLLM in this process: in-place weight transfer, log-prob mismatch, CUDA graphs, sleep levels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu.check import Check, at_least, at_most, holds, measured, untested
from gpu.ground import Ground
from gpu.models import PACKAGED, model, random_prompts, sampled
from gpu.objective import surrogate
from rlflow.backends.local import Trainer
from rlflow.backends.vllm import Generator
from rlflow.training.protocols import ModelSpec, Sampling

# allowed difference of a token's log-prob: kernels differ, and bfloat16 has eight bits
FAR = {"float32": 1e-3, "bfloat16": 0.15}


def checks(ground: Ground) -> Iterator[Check]:
    folder, dtype = (
        (PACKAGED, "float32") if ground.small or not ground.gpu else (model(ground, "0.6b"), "bfloat16")
    )
    trainer = Trainer(
        ModelSpec(folder, trained=True, device=ground.device, dtype=dtype), Trainer.Settings(lr=1e-4)
    )
    batch = random_prompts(ground.rows(2, 32), 3, ground.rows(6, 64), 90)
    generator = made(ground, folder, dtype, enforce_eager=False)
    rows = sampled(generator, batch, 2, ground.rows(4, 64))
    yield from mismatch("with the folder's weights", trainer, rows, dtype)
    trainer.update(rows, surrogate)
    generator.receive(trainer.weights(), 1)
    yield from mismatch(
        "after weights were received", trainer, sampled(generator, batch, 2, ground.rows(4, 64)), dtype
    )
    yield from in_place(trainer, generator)
    yield from mismatch(
        "after weights were written in place",
        trainer,
        sampled(generator, batch, 2, ground.rows(4, 64)),
        dtype,
    )
    yield from slept(ground, trainer, generator, batch, dtype)
    if not ground.gpu:
        yield untested("CUDA graphs", "CUDA graphs need a GPU")
        return
    tokens = 32 * 2 * 64
    seconds = ground.seconds(lambda: generator.generate(batch, Sampling(2, 64), range(64)), 2)
    yield measured("tokens per second with CUDA graphs", tokens / seconds)


def made(ground: Ground, folder: Any, dtype: str, **settings: Any) -> Generator:
    """Create vLLM's generator."""
    return Generator(
        ModelSpec(folder, device=ground.device, dtype=dtype),
        Generator.Settings(
            sleep_mode=ground.gpu, max_num_seqs=64, gpu_memory_utilization=0.3, max_model_len=256, **settings
        ),
    )


def mismatch(name: str, trainer: Trainer, rows: Any, dtype: str) -> Iterator[Check]:
    """Compare vLLM's log-probs of sampled tokens with the trainer's log-probs."""
    found = trainer.forward(rows).data["logprobs"].value - rows.data["sampled_logprobs"].value
    yield at_most(f"{name}: largest difference of a log-prob", float(found.abs().max()), FAR[dtype])


def in_place(trainer: Trainer, generator: Generator) -> Iterator[Check]:
    """Transfer weights by a plan on one rank, directly into the tensors that vLLM's own loader fills."""
    from rlflow.training.weight_sync.execute import Resharder
    from rlflow.training.weight_sync.layout import join
    from rlflow.training.weight_sync.planner import make_plan
    from rlflow.training.weight_sync.shards import held
    from rlflow.training.weight_sync.transport import AllToAll

    pieces = trainer.pieces()
    source = join([held(pieces)])
    there = generator.destinations(source.tensors)
    plan = make_plan(source, join([held(there.pieces)]))
    with generator.writing(2):
        Resharder(plan, 0, pieces, there.pieces, AllToAll(None, generator.spec.device)).run(2)
        there.finish(generator.load)
    yield measured("tensors written in place", len(there.pieces), why=f"of {len(source.tensors)}")


def slept(ground: Ground, trainer: Trainer, generator: Generator, batch: Any, dtype: str) -> Iterator[Check]:
    """Check that sleep levels 1 and 2 do not change the sampled tokens.

    After level 2, the weights are sent again.
    """
    before = generator.generate(batch, Sampling(2, 4, 0.0), range(2 * len(batch))).data["tokens"].value
    for keep in (True, False):
        level = 1 if keep else 2
        there = free_bytes(ground)
        generator.sleep(keep=keep)
        if ground.gpu:
            yield at_least(
                f"memory freed by sleep level {level}", (free_bytes(ground) - there) / 2**30, 1.0, "GiB"
            )
        generator.wake()
        if not keep:
            generator.receive(trainer.weights(), 3)
        after = generator.generate(batch, Sampling(2, 4, 0.0), range(2 * len(batch))).data["tokens"].value
        yield holds(f"the same tokens after level {level}", torch.equal(before, after), "different tokens")


def free_bytes(ground: Ground) -> int:
    """Return the free bytes on the device; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if ground.gpu else 0
