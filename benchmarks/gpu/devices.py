"""Check that checkpoints written on one device can be loaded on another."""

from __future__ import annotations

from collections.abc import Iterator

from gpu.check import Check, at_most, holds
from gpu.ground import Ground
from gpu.models import PACKAGED, prompts, relative, sampled
from gpu.objective import flat, surrogate
from gpu.runs import differing, run
from rlflow.backends.local import Generator, Trainer
from rlflow.monitoring.reporter import Quiet
from rlflow.runs.resume import fork
from rlflow.training.protocols import ModelSpec

LIMIT = 1e-4


def checks(ground: Ground) -> Iterator[Check]:
    rows = sampled(Generator(ModelSpec(PACKAGED)), prompts(ground.rows(4, 32)), 2, 8)
    ways = [("cpu", ground.device), (ground.device, "cpu")] if ground.gpu else [("cpu", "cpu")]
    for source, target in ways:
        one, other = (
            Trainer(ModelSpec(PACKAGED, trained=True, device=device), Trainer.Settings(lr=1e-4))
            for device in (source, target)
        )
        one.update(rows, surrogate)
        state = {name: tensor.detach().cpu().clone() for name, tensor in one.state().items()}
        other.restore(state)
        now = other.state()
        yield holds(
            f"a state from {source} has the same bits on {target}",
            state.keys() == now.keys() and not differing(state, now),
        )
        for trainer in (one, other):
            trainer.update(rows, surrogate)
        found, expected = (
            flat({name: x for name, x in trainer.state().items() if x.is_floating_point()})
            for trainer in (other, one)
        )
        yield at_most(f"weights after another update, {source} to {target}", relative(found, expected), LIMIT)
    yield from forks(ground, ways[: 1 if ground.small else 2])


def forks(ground: Ground, ways: list[tuple[str, str]]) -> Iterator[Check]:
    """For each (source, target) in ``ways``, fork a run from one device and continue it on another device."""
    few = {"prompts": ground.rows(2, 16), "hp.samples": 2, "iterations": 1, "save_every": 1}
    for source, target in ways:
        started = run(ground, "grpo", source, "float32", **few, name=f"begun-{source}-{target}")
        ended = fork(
            started.folder, {"device": target, "iterations": 2, "name": f"ended-{source}-{target}"}, Quiet()
        )
        yield holds(
            f"a run from {source} continues on {target}",
            ended.iterations == 2,
            f"{ended.iterations} iterations",
        )
