"""Going on with a run from its newest good checkpoint, or from there with other settings as a new run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rlflow.author.flow import Flow
from rlflow.author.load import load_flow
from rlflow.checkpoints.load import Loaded, load_latest
from rlflow.checkpoints.lock import Lock
from rlflow.errors import PlanError, listed, nearest
from rlflow.given.flags import Given
from rlflow.graph import wire
from rlflow.graph.diff import diff
from rlflow.graph.model import Graph, Node
from rlflow.runs import directory, state
from rlflow.runs.api import resolved
from rlflow.runs.loop import Prepared, Result, Start
from rlflow.runs.prepare import prepare
from rlflow.runs.session import carried_on
from rlflow.watch.reporter import Reporter
from rlflow.watch.secrets import MASK

MAY_CHANGE = ("iterations", "eval_every", "save_every", "keep", "track", "reward_timeout", "max_missing", "max_mismatch", "canary",
              "max_bad", "heartbeat", "load_timeout", "commit_every", "insecure", "memory")


def resume(folder: Path, changes: Mapping[str, Any], reporter: Reporter) -> Result:
    """Go on where the run stood. Raises PlanError where the algorithm, the data or other settings changed, RunHeld where it runs."""
    saved = read_settings(folder)
    refused = [name for name in changes if name not in MAY_CHANGE and name not in masked_values(saved)]
    if refused:
        raise PlanError.of("resume-setting", f"a resumed run keeps its settings, but --{refused[0]} is given", found=listed(refused),
                           expected=f"changes to {listed(MAY_CHANGE)} only",
                           remedy="rlflow resume RUN --fork … starts a new run with others")
    with Lock(folder):
        flow, given, prepared = again(saved, changes, reporter)
        try:
            same_algorithm(folder, prepared)
            start = restored(folder, prepared, reporter)
            _iterations_left(folder, start, given)
        except BaseException:
            prepared.close()
            raise
        return carried_on(prepared, folder, reporter, start)


def fork(folder: Path, changes: Mapping[str, Any], reporter: Reporter) -> Result:
    """A new run from the checkpoint of another, with other settings or a changed algorithm."""
    saved = read_settings(folder)
    flow, given, prepared = again(saved, {"name": None, **changes}, reporter)
    try:
        start = restored(folder, prepared, reporter)
        _iterations_left(folder, start, given)
        made = directory.create(Path(given.options.out), given.options.name, flow.name)
        reporter.note(f"fork of {folder} at iteration {start.iteration}")
    except BaseException:
        prepared.close()
        raise
    with Lock(made):
        return carried_on(prepared, made, reporter, start)


def read_settings(folder: Path) -> dict[str, Any]:
    """settings.json of a run. Raises PlanError where there is none."""
    try:
        return dict(json.loads((folder / "settings.json").read_text()))
    except (OSError, ValueError) as error:
        runs = [str(path.parent) for path in folder.parent.glob("*/settings.json")] if folder.parent.is_dir() else []
        raise PlanError.of("no-run", f"'{folder}' is no run directory", found=f"settings.json: {error}",
                           expected="a folder that `rlflow run` made", nearest=nearest(str(folder), runs),
                           remedy="`rlflow runs` lists them") from error


def recorded_values(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was given, by flag: its settings among it."""
    return {**saved["values"], **{f"hp.{name}": value for name, value in saved["hp"].items()}}


def masked_values(saved: Mapping[str, Any]) -> list[str]:
    """Flags whose values settings.json has not, since they are secrets."""
    return [name for name, value in recorded_values(saved).items() if MASK in str(value)]


def again(saved: Mapping[str, Any], changes: Mapping[str, Any], reporter: Reporter) -> tuple[Flow, Given, Prepared]:
    """The run prepared again as it was, with changes."""
    flow = load_flow(f"{saved['file']}::{saved['flow']}")
    missing = [name for name in masked_values(saved) if name not in changes]
    if missing:
        raise PlanError.of("resume-secret", f"the run does not keep --{missing[0]}, which is a secret", found=listed(missing),
                           expected="secrets to be given again", remedy=f"rlflow resume RUN --{missing[0]} …")
    recorded = recorded_values(saved)
    if not changes.get("pools", "as before"):
        recorded = {name: value for name, value in recorded.items() if not _of_pools(name)}
    given, hp = resolved(flow, None, {**recorded, **changes}, packaged_beneath=False)
    return flow, given, prepare(flow, hp, given, reporter.note, begun=True)


def _of_pools(flag: str) -> bool:
    """Whether a flag says something only beside --pools."""
    return flag in ("pools", "ray_address") or flag.startswith("pools.") or flag.rpartition(".")[2] == "pool"


def same_algorithm(folder: Path, prepared: Prepared) -> None:
    """Raises PlanError with the differences where the graph is not that of the run. Deadlines may differ."""
    before = timeless(wire.unpack((folder / directory.GRAPH).read_bytes()))
    now = timeless(directory.without_secrets(prepared.plan.graph))
    if wire.identity(before) == wire.identity(now):
        return
    changes = [str(line) for line in diff(before, now)]
    raise PlanError.of("resume-changed", "the algorithm is not the one that this run was started with",
                       found="\n            ".join(changes), expected="the same graph and the same function bodies",
                       remedy=f"undo the change, or start a new run from the checkpoint: rlflow resume {folder} --fork")


def timeless(graph: Graph) -> Graph:
    return dataclasses.replace(graph, nodes=tuple(_timeless(node) for node in graph.nodes))


def _timeless(node: Node) -> Node:
    return dataclasses.replace(node, timeout=0.0, body=timeless(node.body) if node.body else None)


def restored(folder: Path, prepared: Prepared, reporter: Reporter) -> Start:
    """Load the newest good checkpoint into the prepared run; what was damaged is said."""
    loaded: Loaded = load_latest(folder)
    for path, reason in loaded.rejected:
        reporter.note(f"{path.name} is damaged and not used: {reason}")
    start = prepared.executor.lanes.do("control", partial(state.restore, prepared, loaded.snapshot))
    reporter.note(f"resuming from {loaded.path.name}")
    return start


def _iterations_left(folder: Path, start: Start, given: Given) -> None:
    if start.iteration >= given.options.iterations:
        raise PlanError.of("resume-done", f"the run '{folder}' has done its iterations",
                           found=f"{start.iteration} of {given.options.iterations}", expected="iterations that are left",
                           remedy=f"give it more: --iterations {start.iteration + 50}")
