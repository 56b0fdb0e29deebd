"""How the models of a run are kept on its ranks, as far as folders and backends tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from rlflow.binding.backends import device_in
from rlflow.binding.rewards import specs_of
from rlflow.binding.roles import BoundRole, Roles
from rlflow.config.flags import RunConfig
from rlflow.errors import PlanError
from rlflow.graph.model import Graph
from rlflow.memory.sizes import ModelFacts, ModelFootprint
from rlflow.placement import Placement, judging
from rlflow.rewards.spec import parse_reward


def kept(role: BoundRole, dtype: str, where: Placement | None = None) -> ModelFootprint:
    """How the role's model is kept on its pools, where its trainer says what its ranks divide (``divided``)."""
    trainer, generator, name = role.trainer, role.generator, role.name
    if role.folder is None or trainer.can.divided is None:
        return ModelFootprint(None)
    placed = where is not None and name in where.trainers
    ranks = where.pools[where.trainers[name]] if where is not None and placed else 1
    dims = where.lies(name, "trainer").dims if where is not None and placed else ()
    outer = where is not None and where.lies(name, "generator").outer
    return ModelFootprint(facts(role.folder), role.use.head, role.use.trained, dtype, trainer.settings.lora if role.use.trained else 0,
                trainer.settings.lora_targets == "attention", generator.can.batch_tokens, ranks, trainer.can.divided,
                generator.can.tensor, generator.can.cache_bytes, trainer.can.copied, trainer.can.flat, trainer.can.tensor, dims, outer)


def decided(given: RunConfig) -> RunConfig:
    """With the device that ``auto`` is here, for workers that may see other ones."""
    return replace(given, options=replace(given.options, device=device_in(given.options.device)))  # type: ignore[arg-type]


def facts(folder: Path) -> ModelFacts:
    """What a folder says of its model. Raises PlanError where its headers cannot be read."""
    try:
        return _facts(folder, tuple((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.iterdir())))
    except Exception as error:
        raise PlanError.of("model-folder", f"the model folder '{folder}' cannot be read", found=f"{type(error).__name__}: {error}",
                           expected="config.json, and weights as safetensors", remedy="name another folder with --model") from error


@lru_cache(maxsize=16)
def _facts(folder: Path, files: tuple[tuple[str, int, int], ...]) -> ModelFacts:
    """``files``: what the folder was when it was read, so that another one's headers are read anew."""
    return ModelFacts.of(folder)


def reward_models(graph: Graph, roles: Roles, where: Placement, given: RunConfig) -> Iterator[tuple[str, str, ModelFootprint]]:
    """(pool, name, how it is kept) of reward models of their own folder: every rank of the pools that score with them loads them."""
    for role, pools in judging(graph, where).items():
        for spec in specs_of(role, given, [parse_reward(text) for text in given.options.reward]) if role not in roles else ():
            if spec.kind == "model":
                footprint = ModelFootprint(facts(Path(spec.path)), "scores", False, given.options.dtype)
                yield from ((pool, spec.name, footprint) for pool in pools)
