"""Check ``--memory`` with roles that do not fit into memory together: PPO's actor, critic and reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import rlflow
from gpu.check import Check, at_most, holds, measured
from gpu.ground import ROOT, Ground
from gpu.models import model
from gpu.runs import differing, exact, settings
from rlflow.author.load import load_flow


def checks(ground: Ground) -> Iterator[Check]:
    free, peak, _ = iteration(ground, None)
    wanted = sum(sizes(ground).values())
    limit = int(0.7 * wanted)
    held, less, moved = iteration(ground, limit)
    yield measured("memory of all models together", wanted / 2**20, "MiB")
    yield measured("--memory", limit / 2**20, "MiB")
    yield holds("model parts are offloaded and loaded again", moved["residency/moves"] > 0, str(moved))
    yield holds(
        "the same weights as without a limit",
        not (names := differing(free, held)),
        f"{len(names)} tensors differ",
    )
    if ground.gpu:
        yield at_most(
            "peak with the limit ÷ peak without",
            less / peak,
            0.95,
            why=f"{less / 2**20:.0f} of {peak / 2**20:.0f} MiB",
        )


def chosen(ground: Ground, **others: Any) -> dict[str, Any]:
    """Return the settings of a run whose model needs much more memory than its rows."""
    few = {
        "model": str(model(ground, "wide")),
        "prompts": 2,
        "hp.samples": 2,
        "hp.max_tokens": 4,
        "hp.minibatch": 4,
        "actor.batch_tokens": 256,
    }
    return settings(ground, "ppo", ground.device, "float32", **few, **others)


def sizes(ground: Ground) -> dict[str, int]:
    """Return the bytes of each part of PPO's models, as in `rlflow plan`."""
    from rlflow.compiler.trace.compile import TraceOptions
    from rlflow.config.flags import flat
    from rlflow.runs.api import resolve_config
    from rlflow.runs.preview import preview

    flow = load_flow(str(ROOT / "algorithms" / "ppo.py"))
    given, hp = resolve_config(flow, None, flat(chosen(ground)))
    found = preview(flow, hp, given, TraceOptions(1, ("completion", "answer")))
    return {f"{held.role}.{held.half} {held.what}": held.bytes or 0 for held in found.memory}


def iteration(ground: Ground, limit: int | None) -> tuple[dict[str, Any], int, dict[str, float]]:
    """Run two iterations under a memory limit; None: no limit.

    Returns (actor's state, device's peak bytes, how often each part was offloaded).
    """
    flow = load_flow(str(ROOT / "algorithms" / "ppo.py"))
    kept: dict[str, Any] = {}

    def call() -> None:
        roles = rlflow.roles(flow, **chosen(ground, **({} if limit is None else {"memory": limit})))
        try:
            for _ in range(2):
                flow(roles.take(), **{**roles, "reward": exact})
            engine = roles.prepared.engine
            kept["moved"] = engine.offloads.moved()
            trainer = engine.models["actor"].trainer
            trainer.wake()
            kept["state"] = {
                name: tensor.detach().cpu().clone()
                for name, tensor in trainer.state().items()
                if tensor.dim()
            }
        finally:
            roles.close()

    peak = ground.peak(call)
    return kept["state"], peak, kept["moved"]
