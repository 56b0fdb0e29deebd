"""Compare FSDP2 and ZeRO on one rank with the local trainer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch

from gpu.check import Check, at_least, at_most, holds
from gpu.ground import Ground
from gpu.models import PACKAGED, prompts, relative, sampled
from gpu.objective import flat, surrogate
from gpu.ranks import only_rank
from rlflow.backends import local
from rlflow.training.protocols import ModelSpec

LIMIT = 1e-5
STEPS = 3


def checks(ground: Ground, backend: str) -> Iterator[Check]:
    rows = sampled(local.Generator(ModelSpec(PACKAGED)), prompts(ground.rows(4, 32)), 2, 8)
    plain = local.Trainer(
        ModelSpec(PACKAGED, trained=True, device=ground.device), local.Trainer.Settings(lr=1e-4)
    )
    for _ in range(STEPS):
        plain.update(rows, surrogate)
    only_rank(ground.folder, ground.device)
    kind = importlib.import_module(f"rlflow.backends.{backend}").Trainer
    one = kind(ModelSpec(PACKAGED, trained=True, device=ground.device), kind.Settings(lr=1e-4))
    scored = one.forward(rows).data["logprobs"].value
    yield at_most("log-probs before a step", relative(scored, rows.data["sampled_logprobs"].value), 1e-4)
    for _ in range(STEPS):
        one.update(rows, surrogate)
    state, expected = (
        {name: x.detach().cpu() for name, x in trainer.state().items()} for trainer in (one, plain)
    )
    found, wanted = (
        flat({name: x for name, x in each.items() if name.startswith("parameters/")})
        for each in (state, expected)
    )
    yield at_most("parameters after three steps", relative(found, wanted), LIMIT)
    yield holds(
        "its state has the same names",
        state.keys() == expected.keys(),
        str(sorted(state.keys() ^ expected.keys())[:3]),
    )
    yield from weights(ground, one)
    before = ground.allocated()
    one.sleep()
    if ground.gpu:
        size = sum(x.nbytes for name, x in expected.items() if name.startswith("parameters/"))
        yield at_least(
            "sleep frees weights and optimizer",
            (before - ground.allocated()) / 2**20,
            2.5 * size / 2**20,
            "MiB",
        )
    one.wake()
    again = {name: x.detach().cpu() for name, x in one.state().items()}
    yield holds(
        "the state is the same after sleep and wake",
        all(torch.equal(state[name], again[name]) for name in state),
    )
    one.restore(state)
    one.update(rows, surrogate)
    yield holds("training continues from a restored state", one.steps == STEPS + 1)


def weights(ground: Ground, one: object) -> Iterator[Check]:
    """Check that a generator gets the trainer's weights through a transfer plan, as in a pool."""
    from rlflow.cluster.weights.same_ranks import SameRankTransfer
    from rlflow.execution.role_model import Model

    generator = local.Generator(ModelSpec(PACKAGED, device=ground.device))
    moving = SameRankTransfer(Model(one, generator), "auto", "gpu-section", ground.device, 1)
    moving(STEPS)
    there = dict(generator.network.tensors())
    yield holds(
        "a generator receives the weights by a transfer plan",
        all(torch.equal(x.cpu(), there[name].cpu()) for name, x in one.weights()),
    )
    moving.close()
