"""Check that an algorithm learns the packaged task on the device as well as on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpu.check import Check, at_least, holds
from gpu.ground import Ground
from gpu.runs import run

# the accuracy may be this much lower than on the CPU: on 512 questions, three standard deviations are 0.04
APART = 0.05


def checks(ground: Ground, algorithm: str) -> Iterator[Check]:
    many = {"prompts": 64, "iterations": 12, "held_out": 512}
    few = {"prompts": 2, "iterations": 1, "held_out": 0, "hp.samples": 2}
    chosen: dict[str, Any] = few if ground.small else many
    here = None if ground.small else run(ground, algorithm, "cpu", "float32", **chosen)
    for dtype in ("bfloat16",) if ground.small else ("float32", "bfloat16"):
        there = run(ground, algorithm, ground.device, dtype, **chosen)
        yield holds(
            f"{algorithm} runs all its iterations, {dtype}",
            there.iterations == chosen["iterations"],
            f"{there.iterations}",
        )
        if here is not None:
            for kind in ("sampled", "greedy"):
                before, expected, found = (
                    getattr(accuracy, kind) for accuracy in (there.before, here.after, there.after)
                )
                why = f"{before:.3f} before; {expected:.3f} on a CPU"
                yield at_least(f"{algorithm}, {kind} accuracy, {dtype}", found, expected - APART, why=why)
