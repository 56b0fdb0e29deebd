"""From a flow and what is given to what its run would be. Starts nothing, loads no model, opens no data, needs no Ray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlflow.author.flow import Flow
from rlflow.check.check import check
from rlflow.check.staleness import stale_problems
from rlflow.errors import FlowError, PlanError, Problem
from rlflow.explain.explanation import Explanation, explain, here
from rlflow.explain.fits import half_problems, idle_ranks, overlap_problems, short_repeats, stream_problems, unused_pools
from rlflow.explain.memory import Kept, ModelFacts
from rlflow.explain.sizes import Assumed, Sizes
from rlflow.given.backends import Halves, backend, check_settings, device_of, halves, model_folder, settings
from rlflow.given.flags import Given
from rlflow.given.rewards import specs_of
from rlflow.graph.model import Graph, RoleUse
from rlflow.passes import plan
from rlflow.placement import HALVES, Placement, judging, parse_pools, place
from rlflow.rewards.spec import parse_reward
from rlflow.runs.parallel import lying
from rlflow.runs.prepare import model_uses
from rlflow.runs.streaming import streaming
from rlflow.trace.compile import Options, Program


def planned(flow: Flow, hp: Any, given: Given, options: Options) -> Explanation:
    """What a run of the flow would do. ``options``: what of the flags shapes the graph. Raises FlowError and PlanError for what a run
    would refuse, and for what cannot be meant."""
    report = check(flow, hp, options, with_variants=False)
    if report.program is None or not report.ok:
        raise FlowError(*report.errors)
    program, uses = report.program, model_uses(report.program.graph)
    check_settings(uses, given)
    needs = {use.name: halves(program.graph, use) for use in uses}
    sampling = {name: Halves(half.trainer, half.generator or name == evaluated(program.graph, given)) for name, half in needs.items()}
    placement, warnings = placed(program, needs, sampling, given)
    placement = lying(placement, program.graph, uses, given)
    made = plan(program, placement, streaming(program.graph, uses, given))
    if problems := list(stream_problems(made, given.options.staleness)):
        raise PlanError(*problems)
    assumed = Assumed(given.options.prompts, **_prompt_tokens(given))
    sizes = Sizes.of(program.graph, assumed)
    if placement is not None:
        warnings += [*unused_pools(placement), *idle_ranks(made, sizes)]
    warnings += list(short_repeats(program.graph, sizes))
    models = {use.name: kept(use, given, placement) for use in uses}
    where = placement or here(sampling)
    return explain(made, where, assumed, models, list(reward_models(program.graph, uses, where, given)), warnings,
                   given.options.commit_every, ways(given))


def ways(given: Given) -> tuple[str, str]:
    """How weights go to generators on the trainer's pool and on another, as far as it can be told before anything is started: by shared
    memory on one machine without GPUs."""
    options = given.options
    here = options.ray_address is None and device_of(options.device) == "cpu"
    way = options.weights if options.weights != "auto" else "segment" if here else "alltoall"
    return way, "gather" if way == "gather" else "frozen" if options.staleness else "store" if way == "alltoall" else way


def placed(
    program: Program, needs: Mapping[str, Halves], sampling: Mapping[str, Halves], given: Given
) -> tuple[Placement | None, list[Problem]]:
    """Where halves go, None for one process; and warnings. ``sampling``: what roles need with the one that is evaluated. Raises
    PlanError with everything that does not fit."""
    graph, staleness = program.graph, given.options.staleness
    own = {name: _owned(name, given) for name in needs}
    found = [*half_problems(graph, sampling, given.roles, own), *stale_problems(program, staleness)]
    placement: Placement | None = None
    warnings: list[Problem] = []
    try:
        if given.options.pools is not None:
            placement, warnings = _placed(graph, needs, sampling, given)
    except PlanError as error:
        raise PlanError(*found, *error.problems) from None
    if found := [*found, *overlap_problems(graph, placement, staleness)]:
        raise PlanError(*found)
    return placement, warnings


def _placed(
    graph: Graph, needs: Mapping[str, Halves], sampling: Mapping[str, Halves], given: Given
) -> tuple[Placement, list[Problem]]:
    """What is evaluated samples too, even where its flow never does; whether anything is, data and rewards tell a run."""
    pools, flags = parse_pools(given.options.pools or ""), {name: given.role(name) for name in needs}
    placement = place(graph, needs, pools, flags)
    role = evaluated(graph, given)
    if role is None or needs[role].generator:
        return placement, []
    try:
        return place(graph, sampling, pools, flags), []
    except PlanError:
        return placement, [Problem("evaluation-undecided", f"if held-out prompts can be judged, '{role}' samples to be evaluated",
                                   found=f"no --{role}.generator.pool", expected="a pool for the evaluation", severity="warning",
                                   remedy=f"--{role}.generator.pool {next(iter(pools))}, or --held-out 0")]


def evaluated(graph: Graph, given: Given) -> str | None:
    """The role that a run evaluates where its data can be judged."""
    names = [use.name for use in model_uses(graph) if use.trained and use.head == "logprobs"]
    return names[0] if names and given.options.held_out and given.options.backend != "null" else None


def _owned(role: str, given: Given) -> dict[str, set[str]]:
    """For each half the settings that its backend has and the other's has not."""
    names = []
    for half in HALVES:
        kind = getattr(backend(given.backend(role, half)), half.capitalize(), None)
        names.append({field.name for field in fields(kind.Settings)} if kind is not None else set())
    return {half: own - other for half, own, other in zip(HALVES, names, reversed(names), strict=True)}


def _prompt_tokens(given: Given) -> dict[str, int]:
    return {"prompt_tokens": int(given.data["max_prompt"])} if "max_prompt" in given.data else {}


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
    return Kept(facts(folder), use.head, use.trained, given.options.dtype, trainer.lora if use.trained else 0,
                trainer.lora_targets == "attention", getattr(generator, "batch_tokens", 0), ranks, trainers.Trainer.divided(trainer),
                getattr(trainers.Trainer, "flat", False), getattr(trainer, "tensor_parallel", 1), dims,
                getattr(trainers.Trainer, "copy", False),
                getattr(generator, "tensor_parallel", 1), getattr(generator, "kv_cache_memory_bytes", 0))


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
