"""From a flow and what is given to what its run would be. Starts nothing, loads no model, opens no data, needs no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from rlflow.author.flow import Flow
from rlflow.binding.backends import device_in
from rlflow.binding.positions import room
from rlflow.binding.roles import BoundRole, Halves, Roles, bound, model_uses
from rlflow.check.check import check
from rlflow.check.staleness import stale_problems
from rlflow.config.flags import RunConfig, refuse_stray
from rlflow.errors import FlowError, PlanError, Problem
from rlflow.explain.explanation import Explanation, explain, here
from rlflow.explain.fits import (
    half_problems,
    idle_ranks,
    overlap_problems,
    short_repeats,
    stream_problems,
    too_many_rows,
    unused_pools,
)
from rlflow.explain.sizes import Assumed, Sizes
from rlflow.graph.model import HALVES, Graph
from rlflow.memory.footprint import kept, reward_models
from rlflow.memory.inputs import resident
from rlflow.passes import plan
from rlflow.placement import Placement, parse_pools, place
from rlflow.runs.parallelism import lying
from rlflow.runs.prepare import needs
from rlflow.runs.streaming import streaming
from rlflow.trace.compile import Program, TraceOptions


def planned(flow: Flow, hp: Any, given: RunConfig, options: TraceOptions) -> Explanation:
    """What a run of the flow would do. ``options``: what of the flags shapes the graph. Raises FlowError and PlanError for what a run
    would refuse, and for what cannot be meant."""
    report = check(flow, hp, options, with_variants=False)
    if report.program is None or not report.ok:
        raise FlowError(*report.errors)
    program = report.program
    roles = bound(program.graph, given)
    sampling = needs(roles, evaluated(program.graph, given))
    placement, warnings = placed(program, roles, sampling, given)
    placement = lying(placement, program.graph, roles, given.options)
    made = plan(program, placement, streaming(program.graph, roles, given))
    if problems := list(stream_problems(made, given.options.staleness)):
        raise PlanError(*problems)
    where = placement or here(sampling)
    made = resident(made, roles, where, given, evaluated(program.graph, given))
    assumed = Assumed(given.options.prompts, **_prompt_tokens(given))
    sizes = Sizes.of(program.graph, assumed)
    if problems := list(too_many_rows(sizes)):
        raise PlanError(*problems)
    if placement is not None:
        warnings += [*unused_pools(placement), *idle_ranks(made, sizes)]
    warnings += [*short_repeats(program.graph, sizes), *no_room(program.graph, roles, given.options.reward)]
    models = {name: kept(role, given.options.dtype, placement) for name, role in roles.items()}
    return explain(made, where, assumed, models, list(reward_models(program.graph, roles, where, given)), warnings,
                   given.options.commit_every, ways(given))


def no_room(graph: Graph, roles: Roles, rewards: Iterable[str]) -> list[Problem]:
    """A warning where what is sampled leaves no room for a prompt: a run refuses it, once it has data."""
    try:
        room(graph, roles, rewards, False)
    except PlanError as error:
        return [replace(problem, severity="warning") for problem in error.problems]
    return []


def ways(given: RunConfig) -> tuple[str, str]:
    """How weights go to generators on the trainer's pool and on another, as far as it can be told before anything is started: on one
    machine by shared memory, on its GPUs by shared handles and, to another pool, through the store."""
    options, gpus = given.options, device_in(given.options.device) == "cuda"
    way = options.weights if options.weights != "auto" else "segment" if options.ray_address is None else "alltoall"
    between = "store" if way == "alltoall" or (options.weights == "auto" and gpus) else way
    return "handles" if way == "segment" and gpus else way, "frozen" if options.staleness and way != "gather" else between


def placed(
    program: Program, roles: Roles, sampling: Mapping[str, Halves], given: RunConfig
) -> tuple[Placement | None, list[Problem]]:
    """Where halves go, None for one process; and warnings. ``sampling``: what roles need with the one that is evaluated. Raises
    PlanError with everything that does not fit."""
    graph, staleness = program.graph, given.options.staleness
    own = {name: _owned(role) for name, role in roles.items()}
    found = [*half_problems(graph, sampling, given.roles, own), *stale_problems(program, staleness)]
    placement: Placement | None = None
    warnings: list[Problem] = []
    try:
        if given.options.pools is not None:
            placement, warnings = _placed(graph, roles, sampling, given)
        else:
            refuse_stray(list(roles), given)
    except PlanError as error:
        raise PlanError(*found, *error.problems) from None
    if found := [*found, *overlap_problems(graph, placement, staleness)]:
        raise PlanError(*found)
    return placement, warnings


def _placed(
    graph: Graph, roles: Roles, sampling: Mapping[str, Halves], given: RunConfig
) -> tuple[Placement, list[Problem]]:
    """What is evaluated samples too, even where its flow never does; whether anything is, data and rewards tell a run."""
    pools, flags = parse_pools(given.options.pools or ""), {name: given.role(name) for name in roles}
    placement = place(graph, needs(roles, None), pools, flags)
    role = evaluated(graph, given)
    if role is None or roles[role].needs.generator:
        return placement, []
    try:
        return place(graph, sampling, pools, flags), []
    except PlanError:
        return placement, [Problem("evaluation-undecided", f"if held-out prompts can be judged, '{role}' samples to be evaluated",
                                   found=f"no --{role}.generator.pool", expected="a pool for the evaluation", severity="warning",
                                   remedy=f"--{role}.generator.pool {next(iter(pools))}, or --held-out 0")]


def evaluated(graph: Graph, given: RunConfig) -> str | None:
    """The role that a run evaluates where its data can be judged."""
    names = [use.name for use in model_uses(graph) if use.trained and use.head == "logprobs"]
    return names[0] if names and given.options.held_out and given.options.backend != "null" else None


def _owned(role: BoundRole) -> dict[str, set[str]]:
    """For each half the settings that its backend has and the other's has not."""
    names = [{field.name for field in fields(half.settings)} if half.kind is not None else set[str]() for half in role.halves]
    return {half: own - other for half, own, other in zip(HALVES, names, reversed(names), strict=True)}


def _prompt_tokens(given: RunConfig) -> dict[str, int]:
    return {"prompt_tokens": int(given.data["max_prompt"])} if "max_prompt" in given.data else {}
