"""`rlflow plan`: what a run of a flow would be. Starts nothing, loads no model, opens no data, needs no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from rlflow.author.flow import Flow
from rlflow.author.settings import fields
from rlflow.compiler.check.check import check
from rlflow.compiler.graph.model import HALVES, Graph
from rlflow.compiler.preview.explanation import Explanation, explain
from rlflow.compiler.preview.fits import half_problems, short_repeats
from rlflow.compiler.preview.sizes import Assumed, Sizes
from rlflow.compiler.trace.compile import TraceOptions
from rlflow.config.flags import RunConfig
from rlflow.config.footprint import footprint, reward_models
from rlflow.config.options import Options
from rlflow.config.roles.backends import device_in
from rlflow.config.roles.positions import room
from rlflow.config.roles.roles import BoundRole, Roles, bind_roles, shares_weights
from rlflow.errors import FlowError, PlanError, Problem
from rlflow.runs.planning import PlacedRoles, evaluation_role, make_plan, needed, place_roles, pool_warnings


def preview(flow: Flow, hp: Any, config: RunConfig, options: TraceOptions) -> Explanation:
    """Explain what a run of the flow would do. ``options``: what of the flags shapes the graph. Raises FlowError and PlanError for what a
    run would refuse, and for flags that mean nothing."""
    report = check(flow, hp, options, with_variants=False)
    if report.program is None or not report.ok:
        raise FlowError(*report.errors)
    program, graph = report.program, report.program.graph
    roles = bind_roles(graph, config)
    needs = needed(roles, evaluation_role(graph, roles, config.options))
    placed = place_roles(program, roles, config, half_problems(graph, needs, config.roles, {name: _owned(roles[name]) for name in roles}))
    plan = make_plan(program, placed)
    assumed = Assumed(config.options.prompts, **_prompt_tokens(config.data))
    sizes = Sizes.of(graph, assumed)
    warnings = [*evaluation_warnings(placed), *pool_warnings(plan, sizes), *short_repeats(graph, sizes),
                *room_warnings(graph, roles, config.options.reward)]  # fmt: skip
    dtype, where = config.options.dtype, placed.where
    models = {name: replace(footprint(role, dtype, placed.placement), lent=shares_weights(role, config.options))
              for name, role in roles.items()}
    frozen = list(reward_models(graph, roles, where, placed.rewards, dtype))
    return explain(plan, where, assumed, models, frozen, warnings, config.options.copies_every, transports(config.options))


def evaluation_warnings(placed: PlacedRoles) -> Iterator[Problem]:
    """A warning where a run may refuse to evaluate: whether anything is evaluated, data and rewards tell."""
    if placed.undecided is not None and placed.placement is not None:
        role, pool = placed.evaluated, next(iter(placed.placement.pools))
        yield Problem("evaluation-undecided", f"if held-out prompts can be judged, '{role}' samples to be evaluated",
                      found=f"no --{role}.generator.pool", expected="a pool for the evaluation", severity="warning",
                      remedy=f"--{role}.generator.pool {pool}, or --held-out 0")


def room_warnings(graph: Graph, roles: Roles, rewards: Iterable[str]) -> list[Problem]:
    """Warnings where what is sampled leaves no room for a prompt: a run refuses it, once it has data."""
    try:
        room(graph, roles, rewards, False)
    except PlanError as error:
        return [replace(problem, severity="warning") for problem in error.problems]
    return []


def transports(options: Options) -> tuple[str, str]:
    """How weights go to generators on the trainer's pool and on another, as far as it can be told before anything is started: on one
    machine by shared memory, on its GPUs by shared handles and, to another pool, through the store."""
    gpus = device_in(options.device) == "cuda"
    way = options.weights if options.weights != "auto" else "segment" if options.ray_address is None else "alltoall"
    between = "store" if way == "alltoall" or (options.weights == "auto" and gpus) else way
    return "handles" if way == "segment" and gpus else way, "frozen" if options.staleness and way != "gather" else between


def _owned(role: BoundRole) -> dict[str, set[str]]:
    """The settings that each half's backend has and the other half's has not."""
    names = [set(fields(half.kind.Settings)) if half.kind is not None else set[str]() for half in role.halves]
    return {half: own - other for half, own, other in zip(HALVES, names, reversed(names), strict=True)}


def _prompt_tokens(data: Mapping[str, Any]) -> dict[str, int]:
    return {"prompt_tokens": int(data["max_prompt"])} if "max_prompt" in data else {}
