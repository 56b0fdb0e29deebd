"""`rlflow plan`: describe the run that a flow and a configuration would give.

This starts nothing, loads no models, opens no data and doesn't need Ray. The module can also run a flow under
two plans and find the first difference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rlflow.author.figures import Of
from rlflow.author.flow import Flow
from rlflow.author.settings import fields
from rlflow.checkpoints.logs import Growing, objects
from rlflow.compiler.check.checker import check
from rlflow.compiler.graph.model import SIDES, Graph
from rlflow.compiler.preview.explanation import Explanation, explain
from rlflow.compiler.preview.fits import short_repeats, side_problems
from rlflow.compiler.preview.sizes import Assumed, Sizes
from rlflow.compiler.trace.compile import TraceOptions
from rlflow.config.flags import RunConfig
from rlflow.config.footprint import footprint, reward_models
from rlflow.config.options import Options
from rlflow.config.roles.backends import device_in
from rlflow.config.roles.bound import BoundRole, Roles, bind_roles, shares_weights, usual
from rlflow.config.roles.prompt_room import room
from rlflow.errors import FlowError, PlanError, Problem, listed
from rlflow.monitoring import keys
from rlflow.runs.api import resolve_config
from rlflow.runs.context import RunResult
from rlflow.runs.held_out import evaluation_role
from rlflow.runs.planning import PlacedRoles, make_plan, needed, place_roles, pool_warnings
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.run import run


def preview(flow: Flow, hp: Any, config: RunConfig, options: TraceOptions) -> Explanation:
    """Explain the run that a flow and its configuration would give.

    ``options``: the flags that shape the graph. Raises FlowError, and PlanError with all reasons to refuse
    the run that are known without data and all flags that have no effect.
    """
    report = check(flow, hp, options, with_variants=False)
    if report.program is None or not report.ok:
        raise FlowError(*report.errors)
    program, graph = report.program, report.program.graph
    roles = bind_roles(graph, config)
    needs = needed(roles, evaluation_role(graph, roles, config.options))
    placed = place_roles(
        program,
        roles,
        config,
        side_problems(graph, needs, config.roles, {name: _owned(roles[name]) for name in roles}),
    )
    plan = make_plan(program, placed)
    assumed = Assumed(config.options.prompts, **_prompt_tokens(config.data))
    sizes = Sizes.of(graph, assumed)
    warnings = [
        *evaluation_warnings(placed),
        *pool_warnings(plan, sizes),
        *short_repeats(graph, sizes),
        *room_warnings(graph, roles, config.options.reward),
    ]
    dtype, where = config.options.dtype, placed.where
    models = {
        name: replace(
            footprint(role, dtype, placed.placement), writable_copy=shares_weights(role, config.options)
        )
        for name, role in roles.items()
    }
    frozen = list(reward_models(graph, roles, where, placed.rewards, dtype))
    return explain(
        plan,
        where,
        assumed,
        models,
        frozen,
        warnings,
        config.options.copies_every,
        transports(config.options),
    )


def evaluation_warnings(placed: PlacedRoles) -> Iterator[Problem]:
    """Yield a warning if the run may need a pool for its evaluation but no flag names one.

    It is only a warning because the data and rewards decide whether anything is evaluated.
    """
    if placed.undecided is not None and placed.placement is not None:
        role, pool = placed.evaluated, next(iter(placed.placement.pools))
        yield Problem(
            "evaluation-undecided",
            f"if a reward can score the held-out prompts, '{role}' needs a pool to sample its answers",
            found=f"no --{role}.generator.pool",
            expected="a pool for the evaluation",
            severity="warning",
            remedy=f"--{role}.generator.pool {pool}, or --held-out 0",
        )


def room_warnings(graph: Graph, roles: Roles, rewards: Iterable[str]) -> list[Problem]:
    """Return warnings if ``max_tokens`` leaves no room for a prompt. Such a run would refuse to start."""
    try:
        room(graph, roles, rewards, False)
    except PlanError as error:
        return [replace(problem, severity="warning") for problem in error.problems]
    return []


def transports(options: Options) -> tuple[str, str]:
    """Return how weights are sent to a generator on the trainer's own pool, and to one on another pool.

    On one machine, weights go through shared memory. On the GPUs of one machine, they use shared handles
    within a pool and Ray's object store between pools. A run may still choose differently when it starts.
    """
    gpus = device_in(options.device) == "cuda"
    way = (
        options.weights
        if options.weights != "auto"
        else "segment"
        if options.ray_address is None
        else "alltoall"
    )
    between = "store" if way == "alltoall" or (options.weights == "auto" and gpus) else way
    return (
        "handles" if way == "segment" and gpus else way,
        "frozen" if options.staleness and way != "gather" else between,
    )


def _owned(role: BoundRole) -> dict[str, set[str]]:
    """Return, for each side of a role, the settings that only this side's backend has."""
    names = [set(fields(half.kind.Settings)) if half.kind is not None else set[str]() for half in role.sides]
    return {half: own - other for half, own, other in zip(SIDES, names, reversed(names), strict=True)}


def _prompt_tokens(data: Mapping[str, Any]) -> dict[str, int]:
    return {"prompt_tokens": int(data["max_prompt"])} if "max_prompt" in data else {}


# relative difference of weights; even a float64 model has float32 steps in transformers (normalisation,
# rotary embeddings)
ROUNDING = 1e-7
TIMES = (Of.RUN, Of.WEIGHT_CHECK)  # metrics of time and transport, which may differ


def compared(flow: Flow, one: Mapping[str, Any], other: Mapping[str, Any], folder: Path) -> Claim:
    """Run a flow under two plans in float64, and return the claim that both runs are equal.

    If they differ, the claim names the first difference and its cause. The runs have K + 2 iterations, where
    K is the larger staleness. ``one``, ``other``: the flags of each run. ``folder``: where to put the two
    runs.
    """
    if short := without_float64(flow, one, other):
        return Claim(
            "plans",
            flow.name,
            "unproved",
            f"{listed(short)} does not compute in float64, and its rounding would hide differences "
            "between the plans",
        )
    stale = [int(values.get("staleness", 0)) for values in (one, other)]
    fixed = {
        "dtype": "float64",
        "iterations": max(stale) + 2,
        "held_out": 0,
        "save_every": 0,
        "prove": "off",
        "out": str(folder),
    }
    results = [
        run(flow, **{**values, **fixed, "name": name}) for values, name in ((one, "one"), (other, "other"))
    ]
    first = _first_difference(*(result.folder for result in results))
    apart = weights_distance(*results)
    number = f"weights differ by {apart:.3g} of their size after {fixed['iterations']} iterations"
    return _verdict(flow, first, apart, stale[0] == stale[1], number)


def _verdict(flow: Flow, first: str | None, apart: float, equally_stale: bool, number: str) -> Claim:
    """Return the claim that two runs of a flow are equal.

    ``first``: the first difference, or None. ``apart``: the relative distance between the final weights, and
    ``number`` the same as text. ``equally_stale``: whether both runs have the same staleness.
    """
    if first is None and apart == 0:
        return judged(
            "plans",
            flow.name,
            True,
            ("both plans give the same rows, metrics and weights, bit for bit", ""),
            number,
        )
    if not equally_stale:
        return Claim(
            "plans",
            flow.name,
            "unproved",
            f"the plans differ in their staleness, and therefore in {first or 'weights'}",
            number,
        )
    if apart <= ROUNDING and not (first or "").startswith(("completion", "scores")):
        return judged(
            "plans",
            flow.name,
            True,
            (f"both plans agree except for the rounding of sums, in {first or 'weights'}", ""),
            number,
        )
    return judged(
        "plans",
        flow.name,
        False,
        ("", f"the plans differ by more than rounding, first in {first or 'weights'}"),
        number,
    )


def without_float64(flow: Flow, *plans: Mapping[str, Any]) -> list[str]:
    """Return the backends in two plans that don't support float64, such as ``generator vllm``.

    Raises PlanError for invalid flags.
    """
    configs = [resolve_config(flow, None, values)[0] for values in plans]
    used = (
        (half, name)
        for config in configs
        for role in flow.parameters.roles
        for half, name in config.role(role).backends.items()
    )
    return sorted({f"{half} {name}" for half, name in used if not usual(name, half).float64})


def _first_difference(one: Path, other: Path) -> str | None:
    """Return the first column or metric that differs between two runs, with its iteration, or None if they
    are equal.
    """
    table = keys.read(one)
    for file, names in (("samples.jsonl", ("prompt", "completion", "scores")), ("metrics.jsonl", ())):
        lines = [objects(Growing(folder / file).lines()) for folder in (one, other)]
        for left, right in zip(*lines, strict=False):
            for name in names or tuple(
                name for name in left if name not in table or table[name].of not in TIMES
            ):
                if left.get(name) != right.get(name):
                    return f"{name} of iteration {left.get('iteration')}"
    return None


def weights_distance(one: RunResult, other: RunResult) -> float:
    """Return the distance between two runs' final weights, relative to the norm of the first run's weights."""
    apart = size = 0.0
    for path in sorted((one.folder / "final").rglob("*.safetensors")):
        left, right = (
            load_file(path),
            load_file(other.folder / "final" / path.relative_to(one.folder / "final")),
        )
        apart += sum(
            float((tensor.double() - right[name].double()).square().sum()) for name, tensor in left.items()
        )
        size += sum(float(tensor.double().square().sum()) for tensor in left.values())
    return (apart / size) ** 0.5 if size else 0.0
