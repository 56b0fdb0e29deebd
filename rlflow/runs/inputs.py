"""What a run depends on, compared when it goes on with what it was when the run was started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlflow.errors import PlanError
from rlflow.graph.model import Graph
from rlflow.runs import identity
from rlflow.runs.depends import Dependencies, unreadable
from rlflow.runs.identity import Change, Identity, differences
from rlflow.runs.weights import compared
from rlflow.watch.reporter import Reporter


def same_inputs(folder: Path, name: str, reporter: Reporter, found: Dependencies) -> Dependencies:
    """What the run depends on, with the digests that are known of it. Raises PlanError with all that is another than the run was started
    with; of versions and the like a change is said."""
    before = recorded_identity(folder, reporter)
    if before is None:
        return found
    found, changes = compared_inputs(before, found, reporter)
    if changes:
        raise PlanError.of("resume-inputs", f"what the run '{name}' depends on has changed", found="\n            ".join(map(str, changes)),
                           expected="what it was started with",
                           remedy=f"put it back; or start a new run from the checkpoint, with what is there: rlflow resume {name} --fork")
    return found


def other_inputs(folder: Path, reporter: Reporter, graph: Graph, found: Dependencies) -> Dependencies:
    """The same for a fork, which takes what is there now: changes are said."""
    before = recorded_identity(folder, reporter)
    if before is None:
        return found
    found, changes = compared_inputs(before, found, reporter)
    for change in changes:
        reporter.note(f"changed since {folder.name} was started: {change}")
    return found


def compared_inputs(before: Identity, found: Dependencies, reporter: Reporter) -> tuple[Dependencies, list[Change]]:
    """Raises PlanError for weights that cannot be read."""
    for change in differences(before.told, found.identity.told):
        reporter.note(f"since the run was started: {change}; numbers may differ from here on")
    try:
        weights, changes = compared(before.weights, found.identity.weights, found.paths, reporter.note)
    except OSError as error:
        raise unreadable(Path(str(error.filename)).parent, error) from error
    known = replace(found, identity=found.identity.model_copy(update={"weights": weights}))
    return known, [*differences(before.kept, found.identity.kept), *changes]


def recorded_identity(folder: Path, reporter: Reporter) -> Identity | None:
    """What the run left of it; where it left nothing that can be read, that is said."""
    try:
        found, why = identity.read(folder), f"it has no {identity.FILE}"
    except ValueError as error:
        found, why = None, str(error)
    if found is None:
        reporter.note(f"whether model folders, rewards and packages are those that the run was started with cannot be told: {why}")
    return found
