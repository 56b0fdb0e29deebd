"""Layouts of trainers that save bytes: what is decided of them before a run starts."""

from __future__ import annotations

from rlflow.explain.memory import ModelFacts
from rlflow.explain.transfers import matched_dims
from rlflow.given.backends import backend, model_folder, settings
from rlflow.given.flags import Given
from rlflow.graph.model import RoleUse
from rlflow.placement import HALVES, Placement


def matched(use: RoleUse, given: Given, where: Placement | None) -> tuple[tuple[str, int], ...]:
    """The tensors that a role's trainer is to shard along the dimension that its sampler on the same ranks cuts, and which; nothing
    where that saves no bytes, or the trainer does not do it (``match_sampler``)."""
    pool = where.trainers.get(use.name) if where is not None else None
    folder = model_folder(use, given)
    if where is None or pool is None or where.generators.get(use.name) != pool or folder is None:
        return ()
    trainer, generator = (_settings(use, given, half) for half in HALVES)
    size, ranks = getattr(generator, "tensor_parallel", 1), where.pools[pool]
    if size == 1 or ranks % size or not _can(trainer):
        return ()
    try:
        facts = ModelFacts.of(folder)
    except Exception:  # said where the folder is read
        return ()
    return matched_dims(facts, given.options.dtype, ranks, size)


def _can(trainer: object) -> bool:
    """It shards whole tensors, and is asked to. Adapters go as whole tensors anyway."""
    asked = getattr(trainer, "match_sampler", False) and getattr(trainer, "shard", "none") == "full"
    return asked and getattr(trainer, "tensor_parallel", 1) == 1 and not getattr(trainer, "lora", 0)


def _settings(use: RoleUse, given: Given, half: str) -> object:
    module, name = backend(given.backend(use.name, half)), half.capitalize()
    return settings(module, name, use.name, given.role(use.name)) if hasattr(module, name) else None
