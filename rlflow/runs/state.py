"""The state of a run between two iterations: what a checkpoint holds and a resumed run starts from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rlflow.checkpoints.roles import role_tensors, trainer_state
from rlflow.checkpoints.snapshot import Snapshot, host_copy
from rlflow.execution.engine import Model
from rlflow.graph.wire import identity
from rlflow.memory.schedule import copying
from rlflow.runs.evaluate import Accuracy
from rlflow.runs.loop import RunContext, RunStart

QUEUE = "queue"  # files of rows that were sampled ahead


def trained(prepared: RunContext) -> dict[str, Model]:
    """The models that the run changes, by role."""
    return {use.name: prepared.engine.models[use.name] for use in prepared.plan.graph.roles if use.trained}


def snapshot(prepared: RunContext, at: RunStart, cursor: Mapping[str, Any]) -> Snapshot:
    """All that the iterations from ``at`` on depend on, copied to host memory. ``cursor`` is where their data begin, if none of them is
    sampled yet."""
    tensors: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for role, model in trained(prepared).items():
        assert model.trainer is not None
        prepared.engine.keeper.settle(copying(role))
        tensors |= {group: host_copy(members) for group, members in role_tensors(role, model.trainer.state()).items()}
        files |= {f"{role}/{name}": data for name, data in prepared.files.get(role, {}).items()}
    queue, rows = prepared.ahead.saved(at.iteration) if prepared.ahead else ({}, {})
    files |= {f"{QUEUE}/{name}": packed for name, packed in rows.items()}
    state = {
        "prompts": queue.get("cursor", dict(cursor)),
        "queue": queue,
        "flow_state": prepared.engine.state,
        "versions": {role: model.version for role, model in prepared.engine.models.items()},
        "seed": prepared.engine.seed,
        "graph": identity(prepared.plan.graph),
        "before": asdict(at.before) if at.before else None,
        "answers": at.answers,
        "here": asdict(at.here) if at.here else None,
    }
    return Snapshot(at.iteration, tensors, state, files)


def restore(prepared: RunContext, saved: Snapshot) -> RunStart:
    """Put a run that was just prepared where the snapshot was taken.

    Raises PlanError where the data are others, or a role is missing.
    """
    for role, model in trained(prepared).items():
        assert model.trainer is not None
        prepared.engine.keeper.settle(copying(role))
        model.trainer.restore(trainer_state(saved.tensors, role))
    for role, version in saved.state["versions"].items():
        if role in prepared.engine.models:
            prepared.engine.models[role].version = version
            prepared.engine.models[role].sampled_version = -1 if version else 0  # the generator was loaded from the first weights
    prepared.engine.state = dict(saved.state["flow_state"])
    prepared.prompts.load(saved.state["prompts"])
    if prepared.ahead is not None and saved.state["queue"]:
        start = f"{QUEUE}/"
        files = {name.removeprefix(start): rows for name, rows in saved.files.items() if name.startswith(start)}
        prepared.ahead.restore(saved.state["queue"], files)
    before, here = (Accuracy(**found) if (found := saved.state.get(name)) else None for name in ("before", "here"))
    return RunStart(saved.iteration, before, saved.state["answers"], here)
