"""What a run depends on, compared when it goes on with what it was when the run was started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlflow.compiler.graph.model import Graph
from rlflow.errors import PlanError
from rlflow.monitoring.reporter import Reporter
from rlflow.runs import identity
from rlflow.runs.depends import Dependencies, unreadable
from rlflow.runs.identity import Change, Identity, differences
from rlflow.runs.weights import compare_weights


def same_inputs(folder: Path, name: str, reporter: Reporter, dependencies: Dependencies) -> Dependencies:
    """Compare what a run depends on with what it was started with; the dependencies with the digests that are known of them. Raises
    PlanError with everything that has changed; of versions and the like a change is reported."""
    before = recorded_identity(folder, reporter)
    if before is None:
        return dependencies
    dependencies, changes = compare_inputs(before, dependencies, reporter)
    if changes:
        raise PlanError.of("resume-inputs", f"what the run '{name}' depends on has changed", found="\n            ".join(map(str, changes)),
                           expected="what it was started with",
                           remedy=f"put it back; or start a new run from the checkpoint, with what is there: rlflow resume {name} --fork")
    return dependencies


def other_inputs(folder: Path, reporter: Reporter, graph: Graph, dependencies: Dependencies) -> Dependencies:
    """Compare what a fork depends on with what its run was started with. Changes are taken, and reported."""
    before = recorded_identity(folder, reporter)
    if before is None:
        return dependencies
    dependencies, changes = compare_inputs(before, dependencies, reporter)
    for change in changes:
        reporter.note(f"changed since {folder.name} was started: {change}")
    return dependencies


def compare_inputs(before: Identity, dependencies: Dependencies, reporter: Reporter) -> tuple[Dependencies, list[Change]]:
    """The dependencies with the digests that are known of them, and what has changed since ``before``. Raises PlanError for weights
    that cannot be read."""
    for change in differences(before.told, dependencies.identity.told):
        reporter.note(f"since the run was started: {change}; numbers may differ from here on")
    try:
        weights, changes = compare_weights(before.weights, dependencies.identity.weights, dependencies.paths, reporter.note)
    except OSError as error:
        raise unreadable(Path(str(error.filename)).parent, error) from error
    known = replace(dependencies, identity=dependencies.identity.model_copy(update={"weights": weights}))
    return known, [*differences(before.kept, dependencies.identity.kept), *changes]


def recorded_identity(folder: Path, reporter: Reporter) -> Identity | None:
    """The identity that a run recorded; None, which is reported, where it left none that can be read."""
    try:
        recorded, why = identity.read(folder), f"it has no {identity.FILE}"
    except ValueError as error:
        recorded, why = None, str(error)
    if recorded is None:
        reporter.note(f"whether model folders, rewards and packages are those that the run was started with cannot be told: {why}")
    return recorded
