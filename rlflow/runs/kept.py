"""How the models of a run are kept on its ranks, as far as folders and backends tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError
from rlflow.explain.memory import Kept, ModelFacts
from rlflow.given.backends import backend, device_of, model_folder, settings
from rlflow.given.flags import Given
from rlflow.given.rewards import specs_of
from rlflow.graph.model import Graph, RoleUse
from rlflow.placement import HALVES, Placement, judging
from rlflow.rewards.spec import parse_reward


def kept(use: RoleUse, given: Given, where: Placement | None = None) -> Kept:
    """How the role's model is kept on its pools, where its trainer says what its ranks divide (``divided``)."""
    chosen, folder = given.role(use.name), model_folder(use, given)
    trainers, generators = (backend(given.backend(use.name, half)) for half in HALVES)
    if folder is None or not hasattr(getattr(trainers, "Trainer", None), "divided"):
        return Kept(None)
    trainer = settings(trainers, "Trainer", use.name, chosen)
    generator = settings(generators, "Generator", use.name, chosen) if hasattr(generators, "Generator") else None
    placed = where is not None and use.name in where.trainers
    ranks = where.pools[where.trainers[use.name]] if where is not None and placed else 1
    dims = where.lies(use.name, "trainer").dims if where is not None and placed else ()
    outer = where is not None and where.lies(use.name, "generator").outer
    return Kept(facts(folder), use.head, use.trained, given.options.dtype, trainer.lora if use.trained else 0,
                trainer.lora_targets == "attention", getattr(generator, "batch_tokens", 0), ranks, trainers.Trainer.divided(trainer),
                getattr(generator, "tensor_parallel", 1), _cache_bytes(generators, generator, given),
                bool(getattr(trainers.Trainer, "copied", False)), bool(getattr(trainers.Trainer, "flat", False)),
                getattr(trainer, "tensor_parallel", 1), dims, outer)


def _cache_bytes(module: Any, chosen: Any, given: Given) -> int:
    """Of a generator whose cache is as large as its settings say."""
    told = getattr(getattr(module, "Generator", None), "cache_bytes", None)
    return int(told(chosen, device_in(given))) if told is not None else 0


def device_in(given: Given) -> str:
    """The kind of device that a run would have, which need not be here."""
    return "cuda" if given.options.device == "cuda" else device_of(given.options.device)


def decided(given: Given) -> Given:
    """With the device that ``auto`` is here, for workers that may see other ones."""
    return replace(given, options=replace(given.options, device=device_in(given)))  # type: ignore[arg-type]


def facts(folder: Path) -> ModelFacts:
    """Raises PlanError for a folder whose headers cannot be read."""
    try:
        return ModelFacts.of(folder)
    except Exception as error:
        raise PlanError.of("model-folder", f"the model folder '{folder}' cannot be read", found=f"{type(error).__name__}: {error}",
                           expected="config.json, and weights as safetensors", remedy="name another folder with --model") from error


def reward_models(graph: Graph, uses: list[RoleUse], where: Placement, given: Given) -> Iterator[tuple[str, str, Kept]]:
    """(pool, name, how it is kept) of reward models of their own folder: every rank of the pools that score with them loads them."""
    models = {use.name for use in uses}
    for role, pools in judging(graph, where).items():
        for spec in specs_of(role, given, [parse_reward(text) for text in given.options.reward]) if role not in models else ():
            if spec.kind == "model":
                yield from ((pool, spec.name, Kept(facts(Path(spec.path)), "scores", False, given.options.dtype)) for pool in pools)
