"""Work out how much memory models need on each rank, as far as their folders and backends reveal it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from rlflow.compiler.byte_sizes import ModelFacts, ModelFootprint
from rlflow.compiler.graph.model import Graph
from rlflow.compiler.placement import Placement, reward_pools
from rlflow.config.roles.bound import BoundRole, Roles
from rlflow.config.roles.rewards import RewardNames
from rlflow.errors import PlanError


def footprint(role: BoundRole, dtype: str, placement: Placement | None = None) -> ModelFootprint:
    """Return the memory that a role's model needs on its pools.

    The memory is unknown (``ModelFootprint(None)``) if the role has no model folder, or if its trainer
    doesn't declare how ranks divide the model (``divided``). Raises PlanError if the headers of the weight
    files can't be read.
    """
    trainer, generator, name = role.trainer, role.generator, role.name
    if role.folder is None or trainer.can.divided is None:
        return ModelFootprint(None)
    placed = placement is not None and name in placement.trainers
    ranks = placement.pools[placement.trainers[name]] if placement is not None and placed else 1
    return ModelFootprint(
        facts(role.folder),
        role.use.head,
        role.use.trained,
        dtype,
        lora=trainer.settings.lora if role.use.trained else 0,
        attention=trainer.settings.lora_targets == "attention",
        batch_tokens=generator.can.batch_tokens,
        shares=ranks,
        divided=trainer.can.divided,
        sampler_shares=generator.can.tensor,
        cache_bytes=generator.can.cache_bytes,
        copied=trainer.can.copied,
        flat=trainer.can.flat,
        tensor=trainer.can.tensor,
        follows=role.use.follows is not None,
        arriving=placed and placement is not None and _far(role, placement),
    )


def _far(role: BoundRole, placement: Placement) -> bool:
    """Return True if a role follows a role whose trainer is on another pool."""
    other = role.use.follows
    return other is not None and placement.trainers[other] != placement.trainers[role.name]


def facts(folder: Path) -> ModelFacts:
    """Return the configuration in a model folder and the shapes of its weights.

    The result is cached until a file's size or modification time changes. Raises PlanError if the folder
    can't be read.
    """
    try:
        return _facts(
            folder,
            tuple(
                (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())
            ),
        )
    except Exception as error:
        raise PlanError.of(
            "model-folder",
            f"the model folder '{folder}' cannot be read",
            found=f"{type(error).__name__}: {error}",
            expected="config.json, and weights as safetensors",
            remedy="name another folder with --model",
        ) from error


@lru_cache(maxsize=16)
def _facts(folder: Path, files: tuple[tuple[str, int, int], ...]) -> ModelFacts:
    """Read the folder. ``files`` (name, bytes, time) is only part of the cache key."""
    return ModelFacts.of(folder)


def reward_models(
    graph: Graph, roles: Roles, placement: Placement, rewards: RewardNames, dtype: str
) -> Iterator[tuple[str, str, ModelFootprint]]:
    """Yield (pool, name, memory) for each reward model with its own folder, once per pool that uses it.

    Every rank of the pool loads a complete copy of the model.
    """
    for role, pools in reward_pools(graph, placement).items():
        for spec in rewards.of_role(role) if role not in roles else ():
            if spec.kind == "model":
                size = ModelFootprint(facts(Path(spec.path)), "scores", False, dtype)
                yield from ((pool, spec.name, size) for pool in pools)
