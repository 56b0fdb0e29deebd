"""One text under two plans: a few iterations of each, and the first thing in which they differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from rlflow.author.figures import Of
from rlflow.author.flow import Flow
from rlflow.checkpoints.logs import Growing, objects
from rlflow.config.roles.roles import usual
from rlflow.errors import listed
from rlflow.monitoring import keys
from rlflow.runs.api import resolve_config
from rlflow.runs.context import RunResult
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.run import run

ROUNDING = 1e-7  # of weights over their size: transformers normalises and rotates in float32 in a float64 model too
TIMES = (Of.RUN, Of.CANARY)  # what metrics of time and transport are of


def compared(flow: Flow, one: Mapping[str, Any], other: Mapping[str, Any], folder: Path) -> Claim:
    """Run both for K + 2 iterations in float64, K the larger staleness; equal, or the first difference and its cause."""
    if short := without_float64(flow, one, other):
        return Claim("plans", flow.name, "unproved", f"{listed(short)} computes in numbers shorter than float64, whose rounding hides what "
                     "plans differ in")  # fmt: skip
    stale = [int(values.get("staleness", 0)) for values in (one, other)]
    fixed = {"dtype": "float64", "iterations": max(stale) + 2, "held_out": 0, "save_every": 0, "prove": "off", "out": str(folder)}
    results = [run(flow, **{**values, **fixed, "name": name}) for values, name in ((one, "one"), (other, "other"))]
    first = _first_difference(*(result.folder for result in results))
    apart = weights_apart(*results)
    number = f"weights apart by {apart:.3g} of their size after {fixed['iterations']} iterations"
    if first is None and apart == 0:
        return judged("plans", flow.name, True, ("both plans give the same rows, metrics and weights, bit for bit", ""), number)
    if stale[0] != stale[1]:
        return Claim("plans", flow.name, "unproved", f"the plans have other staleness, from which {first or 'weights'} differ", number)
    if apart <= ROUNDING and not (first or "").startswith(("completion", "scores")):
        return judged("plans", flow.name, True, (f"both plans agree up to the order of sums: {first or 'weights'} differ by rounding", ""),
                      number)
    return judged("plans", flow.name, False, ("", f"the plans differ, first in {first or 'weights'}, by more than rounding"), number)


def without_float64(flow: Flow, *plans: Mapping[str, Any]) -> list[str]:
    """The backends of two plans that do not compute in float64, such as ``generator vllm``. Raises PlanError for flags that do not fit."""
    configs = [resolve_config(flow, None, values)[0] for values in plans]
    used = ((half, name) for config in configs for role in flow.parameters.roles for half, name in config.role(role).backends.items())
    return sorted({f"{half} {name}" for half, name in used if not usual(name, half).float64})


def _first_difference(one: Path, other: Path) -> str | None:
    """The first column or metric in which two runs differ, and in which iteration; None where they do not."""
    table = keys.read(one)
    for file, names in (("samples.jsonl", ("prompt", "completion", "scores")), ("metrics.jsonl", ())):
        lines = [objects(Growing(folder / file).lines()) for folder in (one, other)]
        for left, right in zip(*lines, strict=False):
            for name in names or tuple(name for name in left if name not in table or table[name].of not in TIMES):
                if left.get(name) != right.get(name):
                    return f"{name} of iteration {left.get('iteration')}"
    return None


def weights_apart(one: RunResult, other: RunResult) -> float:
    """How far the last weights of two runs are apart, over the size of the first."""
    apart = size = 0.0
    for path in sorted((one.folder / "final").rglob("*.safetensors")):
        left, right = load_file(path), load_file(other.folder / "final" / path.relative_to(one.folder / "final"))
        apart += sum(float((tensor.double() - right[name].double()).square().sum()) for name, tensor in left.items())
        size += sum(float(tensor.double().square().sum()) for tensor in left.values())
    return (apart / size) ** 0.5 if size else 0.0
