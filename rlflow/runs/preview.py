"""`rlflow plan`: what a run of a flow would be. Starts nothing, loads no model, opens no data, needs no
Ray.

Here too: one text under two plans, and the first thing in which they differ.
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
from rlflow.compiler.graph.model import HALVES, Graph
from rlflow.compiler.preview.explanation import Explanation, explain
from rlflow.compiler.preview.fits import half_problems, short_repeats
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
from rlflow.runs.planning import PlacedRoles, evaluation_role, make_plan, needed, place_roles, pool_warnings
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.run import run


def preview(flow: Flow, hp: Any, config: RunConfig, options: TraceOptions) -> Explanation:
    """Explain what a run of the flow would do. ``options``: what of the flags shapes the graph. Raises
    FlowError and PlanError for what a run would refuse, and for flags that mean nothing."""
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
        half_problems(graph, needs, config.roles, {name: _owned(roles[name]) for name in roles}),
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
        name: replace(footprint(role, dtype, placed.placement), lent=shares_weights(role, config.options))
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
    """A warning where a run may refuse to evaluate: whether anything is evaluated, data and rewards tell."""
    if placed.undecided is not None and placed.placement is not None:
        role, pool = placed.evaluated, next(iter(placed.placement.pools))
        yield Problem(
            "evaluation-undecided",
            f"if held-out prompts can be judged, '{role}' samples to be evaluated",
            found=f"no --{role}.generator.pool",
            expected="a pool for the evaluation",
            severity="warning",
            remedy=f"--{role}.generator.pool {pool}, or --held-out 0",
        )


def room_warnings(graph: Graph, roles: Roles, rewards: Iterable[str]) -> list[Problem]:
    """Warnings where what is sampled leaves no room for a prompt: a run refuses it, once it has data."""
    try:
        room(graph, roles, rewards, False)
    except PlanError as error:
        return [replace(problem, severity="warning") for problem in error.problems]
    return []


def transports(options: Options) -> tuple[str, str]:
    """How weights go to generators on the trainer's pool and on another, as far as it can be told before
    anything is started: on one machine by shared memory, on its GPUs by shared handles and, to another pool,
    through the store."""
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
    """The settings that each half's backend has and the other half's has not."""
    names = [set(fields(half.kind.Settings)) if half.kind is not None else set[str]() for half in role.halves]
    return {half: own - other for half, own, other in zip(HALVES, names, reversed(names), strict=True)}


def _prompt_tokens(data: Mapping[str, Any]) -> dict[str, int]:
    return {"prompt_tokens": int(data["max_prompt"])} if "max_prompt" in data else {}


# of weights over their size: transformers normalises and rotates in float32 in a float64 model too
ROUNDING = 1e-7
TIMES = (Of.RUN, Of.CANARY)  # what metrics of time and transport are of


def compared(flow: Flow, one: Mapping[str, Any], other: Mapping[str, Any], folder: Path) -> Claim:
    """Run both for K + 2 iterations in float64, K the larger staleness; equal, or the first difference and
    its cause."""
    if short := without_float64(flow, one, other):
        return Claim(
            "plans",
            flow.name,
            "unproved",
            f"{listed(short)} computes in numbers shorter than float64, whose rounding hides what "
            "plans differ in",
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
    apart = weights_apart(*results)
    number = f"weights apart by {apart:.3g} of their size after {fixed['iterations']} iterations"
    if first is None and apart == 0:
        return judged(
            "plans",
            flow.name,
            True,
            ("both plans give the same rows, metrics and weights, bit for bit", ""),
            number,
        )
    if stale[0] != stale[1]:
        return Claim(
            "plans",
            flow.name,
            "unproved",
            f"the plans have other staleness, from which {first or 'weights'} differ",
            number,
        )
    if apart <= ROUNDING and not (first or "").startswith(("completion", "scores")):
        return judged(
            "plans",
            flow.name,
            True,
            (f"both plans agree up to the order of sums: {first or 'weights'} differ by rounding", ""),
            number,
        )
    return judged(
        "plans",
        flow.name,
        False,
        ("", f"the plans differ, first in {first or 'weights'}, by more than rounding"),
        number,
    )


def without_float64(flow: Flow, *plans: Mapping[str, Any]) -> list[str]:
    """The backends of two plans that do not compute in float64, such as ``generator vllm``. Raises PlanError
    for flags that do not fit."""
    configs = [resolve_config(flow, None, values)[0] for values in plans]
    used = (
        (half, name)
        for config in configs
        for role in flow.parameters.roles
        for half, name in config.role(role).backends.items()
    )
    return sorted({f"{half} {name}" for half, name in used if not usual(name, half).float64})


def _first_difference(one: Path, other: Path) -> str | None:
    """The first column or metric in which two runs differ, and in which iteration; None where they do not."""
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


def weights_apart(one: RunResult, other: RunResult) -> float:
    """How far the last weights of two runs are apart, over the size of the first."""
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
