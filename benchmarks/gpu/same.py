"""Check that the device gives the same numbers as a CPU: random draws, log-probs, gradients and a full
iteration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from gpu.check import Check, at_least, at_most, holds, measured, untested
from gpu.ground import Ground
from gpu.models import PACKAGED, furthest, prompts, relative, rounded_products, sampled
from gpu.objective import Recorder, flat, squares, surrogate
from gpu.runs import once
from rlflow.author.seeds import splitmix, uniforms
from rlflow.backends.local import Generator
from rlflow.backends.local.sampling import draw
from rlflow.training.protocols import ModelSpec, Sampling

LIMIT = 1e-4  # largest difference for float32 without TF32
# largest difference for float64; transformers still computes norms and rotary angles in float32
DOUBLE = 1e-6
LOW = 0.05  # largest difference between bfloat16, which has eight bits, and float32


def checks(ground: Ground) -> Iterator[Check]:
    yield from random_numbers(ground)
    rows = sampled(Generator(ModelSpec(PACKAGED)), prompts(ground.rows(8, 64)), 2, 8)
    with rounded_products(False):
        policy = computed("cpu", "logprobs", rows)
        yield from compared(ground, "logprobs", rows, policy)
        yield from compared(ground, "values", rows, computed("cpu", "values", rows))
    yield from lower(ground, rows, policy)
    yield from iterations(ground)


def random_numbers(ground: Ground) -> Iterator[Check]:
    """Check the random numbers of rows, and the tokens sampled with them."""
    counters = torch.arange(-(2**16), 2**16) * 0x9E3779B97F4A7C15 % 2**63
    yield holds(
        "random numbers of row keys have the same bits",
        torch.equal(splitmix(counters.to(ground.device)).cpu(), splitmix(counters)),
    )
    logits = torch.randn(2048, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    uniform = uniforms(range(2048), 1)[:, 0]
    for sampling in (Sampling(), Sampling(temperature=0.7, top_p=0.9, top_k=40)):
        here, there = (
            draw(logits, uniform, sampling)[0],
            draw(logits.to(ground.device), uniform.to(ground.device), sampling)[0].cpu(),
        )
        yield at_least(
            f"share of equal tokens, float64, top_p {sampling.top_p:g}",
            float((here == there).double().mean()),
            1.0,
        )


WANT: dict[str, tuple[tuple[str, ...], Any]] = {
    "logprobs": (("logprobs", "entropy"), surrogate),
    "values": (("values",), squares),
}
Computed = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]  # columns and gradients, by name


def compared(ground: Ground, head: str, rows: Any, expected: Computed) -> Iterator[Check]:
    """Compare log-probs or values, and their gradients, on the device with the CPU's results ``expected``."""
    (here, mine), (there, theirs) = expected, computed(ground.device, head, rows)
    for name in here:
        yield at_most(f"{name}, float32", furthest(there[name], here[name]), LIMIT)
    yield at_most(f"gradient of {head}, float32", relative(flat(theirs), flat(mine)), LIMIT)


def computed(device: str, head: Any, rows: Any, dtype: str = "float32") -> Computed:
    """Return the columns of a forward pass, and the gradients, computed on a device."""
    want, objective = WANT[head]
    trainer = Recorder(ModelSpec(PACKAGED, head, True, device, dtype))
    if head == "values":  # a new head has zero weights, so give it others
        weight = trainer.network.head.weight
        weight.data.copy_(torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype).view_as(weight))
    columns = trainer.forward(rows, want)
    trainer.update(rows, objective)
    return {name: columns.data[name].value for name in want}, trainer.gradients


def lower(ground: Ground, rows: Any, expected: Computed) -> Iterator[Check]:
    """Check bfloat16 against the CPU's float32 results. TF32 is only measured, because rlflow disables it."""
    (here, mine) = expected
    if not ground.gpu:
        yield untested("TF32", "TF32 needs a GPU")
    for name, dtype, allowed in (("TF32", "float32", True), ("bfloat16", "bfloat16", False))[
        not ground.gpu :
    ]:
        with rounded_products(allowed):
            there, theirs = computed(ground.device, "logprobs", rows, dtype)
        off = furthest(there["logprobs"], here["logprobs"])
        yield measured(f"logprobs, {name}", off) if allowed else at_most(f"logprobs, {name}", off, LOW)
        yield measured(f"gradient of logprobs, {name}", relative(flat(theirs), flat(mine)))


def iterations(ground: Ground) -> Iterator[Check]:
    """Run one complete iteration with the same seed on both devices, and compare the results."""
    for dtype, limit in (("float32", LIMIT),) if ground.small else (("float64", DOUBLE), ("float32", LIMIT)):
        here, there = (
            once(ground, "grpo" if ground.small else "ppo", device, dtype)
            for device in ("cpu", ground.device)
        )
        alike = (
            float((here.tokens == there.tokens).double().mean())
            if here.tokens.shape == there.tokens.shape
            else 0.0
        )
        yield at_least(
            f"share of equal tokens of an iteration, {dtype}", alike, 1.0 if dtype == "float64" else 0.99
        )
        off = relative(flat(there.parameters), flat(here.parameters))
        if alike == 1.0:
            yield at_most(f"parameters after an iteration, {dtype}", off, limit)
        else:
            yield measured(f"parameters after an iteration, {dtype}", off, why="tokens differ, so no bound")
