"""A run's state between two iterations, which is saved in checkpoints and restored by `resume`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from rlflow.checkpoints.role_tensors import PARAMETERS, role_tensors, roles_of, trainer_state
from rlflow.checkpoints.snapshot import Snapshot, host_copy
from rlflow.compiler.graph.model import Op, all_nodes
from rlflow.compiler.graph.wire import identity
from rlflow.compiler.residency_schedule import copying
from rlflow.errors import PlanError, StageError, listed
from rlflow.execution.engine import FlowState
from rlflow.execution.memory.saved import restored, saved
from rlflow.execution.role_model import RoleModel
from rlflow.runs.context import RunContext, RunStart
from rlflow.runs.evaluate import Accuracy

QUEUE = "queue"  # files of rows that were sampled ahead of training
MEMORY = "memory"  # files of what the flow keeps across iterations


def trained(context: RunContext) -> dict[str, RoleModel]:
    """Return the models of the trained roles, by role."""
    return {use.name: context.engine.models[use.name] for use in context.plan.graph.roles if use.trained}


def changed(context: RunContext) -> dict[str, RoleModel]:
    """Return the models of all roles whose weights the run may change, by role.

    These are the trained roles, and roles that are passed to a stage with side effects.
    """
    return {role: context.engine.models[role] for role in context.plan.graph.changed_roles}


@dataclass(frozen=True)
class KeptState:
    """The models' state before an iteration, kept because later iterations may change the models."""

    # (role, its trainer's state) for each role that the run may change
    states: Iterable[tuple[str, Mapping[str, Any]]]
    versions: Mapping[str, int]  # role → how many updates its weights have had
    flow_state: FlowState
    # rows sampled ahead of training, as returned by ``Ahead.saved``
    queue: tuple[Mapping[str, Any], Mapping[str, bytes]] | None


def snapshot(
    context: RunContext, at: RunStart, cursor: Mapping[str, Any], kept: KeptState | None = None
) -> Snapshot:
    """Take a snapshot of the run before iteration ``at``, as a copy in host memory.

    It contains everything that this and later iterations depend on. ``cursor``: position in the data of the
    first iteration that isn't sampled yet. If rows were sampled ahead of training, the position where these
    rows begin is used instead. ``kept``: the state before the iteration, if the models have moved on. Raises
    StageError if any weights aren't finite.
    """
    kept = kept or _state_now(context, at.iteration)
    tensors: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    for role, state in kept.states:
        groups = role_tensors(role, state)
        _check_finite(context, role, groups[f"{role}.{PARAMETERS}"])
        tensors |= {group: host_copy(members) for group, members in groups.items()}
        files |= {f"{role}/{name}": data for name, data in context.files.get(role, {}).items()}
    queue, rows = kept.queue or ({}, {})
    files |= {f"{QUEUE}/{name}": packed for name, packed in rows.items()}
    memory, parts = saved(kept.flow_state.memory, context.engine)
    files |= {f"{MEMORY}/{name}": packed for name, packed in parts.items()}
    state = {
        "prompts": queue.get("cursor", dict(cursor)),
        "queue": queue,
        "flow_state": kept.flow_state.scalars,
        "memory": memory,
        "versions": kept.versions,
        "seed": context.engine.seed,
        "graph": identity(context.plan.graph),
        "before": asdict(at.before) if at.before else None,
        "answers": at.answers,
        "here": asdict(at.here) if at.here else None,
    }
    return Snapshot(at.iteration, tensors, state, files)


def _check_finite(context: RunContext, role: str, weights: Mapping[str, Tensor]) -> None:
    """Raise StageError if weights about to be saved contain NaN or infinity.

    Updates check their own results, so such weights come from a stage with side effects.
    """
    bad = [
        name
        for name, weight in weights.items()
        if weight.numel() and not all(bound.isfinite() for bound in weight.aminmax())
    ]
    if not bad:
        return
    nodes = [
        node for node in all_nodes(context.plan.graph.nodes) if node.body is None and role in node.writes
    ]
    blamed = next((node for node in nodes if node.op is Op.STAGE), nodes[0])
    raise StageError(
        "",
        context.engine.iteration,
        0,
        f"{len(bad)} of {len(weights)} weights of '{role}' have NaN or infinities, such as {listed(bad, 3)}; "
        f"they are not saved. These nodes may change them: {listed(repr(node.name) for node in nodes)}",
        blamed.place,
    )


@dataclass(frozen=True)
class MemoryCopy:
    """An in-memory checkpoint: a copy of a run's state before an iteration."""

    iteration: int
    cursor: Mapping[str, Any]  # position in the prompts
    kept: KeptState


def copied(context: RunContext, iteration: int, cursor: Mapping[str, Any]) -> MemoryCopy:
    """Copy the models' current state, before ``iteration`` starts."""
    kept = _state_now(context, iteration)
    states = [(role, host_copy(state)) for role, state in kept.states]
    return MemoryCopy(iteration, cursor, replace(kept, states=states))


def _state_now(context: RunContext, iteration: int) -> KeptState:
    """Return the models' current state without copying it, before ``iteration`` starts."""
    versions = {role: model.version for role, model in context.engine.models.items()}
    queue = context.ahead.saved(iteration) if context.ahead else None
    return KeptState(_trainer_states(context), versions, context.engine.flow_state, queue)


def _trainer_states(context: RunContext) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (role, its trainer's state). Only one at a time, because a state is as large as the model."""
    for role, model in changed(context).items():
        assert model.trainer is not None
        context.engine.offloads.settle(copying(role))
        yield role, model.trainer.state()


def restore_models(context: RunContext, saved: Snapshot) -> None:
    """Load a snapshot's weights and optimizers into the models of a prepared run.

    Raises PlanError if a role isn't in the snapshot or its weights don't fit the model. In a fork, a stage
    with side effects may get a role that the original run never changed; such a role keeps the weights from
    its model folder.
    """
    same_flow = saved.state.get("graph") == identity(context.plan.graph)
    for role, model in changed(context).items():
        if not same_flow and role not in trained(context) and role not in roles_of(saved.tensors):
            continue
        assert model.trainer is not None
        context.engine.offloads.settle(copying(role))
        weights = trainer_state(saved.tensors, role)
        try:
            model.trainer.restore(weights)
        except (KeyError, ValueError) as error:  # names or shapes that the model does not have
            raise _misfit(role, error) from error
    for role, version in saved.state["versions"].items():
        if role in context.engine.models:
            context.engine.models[role].version = version
            # the generator was loaded with the first weights
            context.engine.models[role].sampled_version = -1 if version else 0


def _misfit(role: str, error: Exception) -> PlanError:
    """Return the error to raise if a checkpoint's weights don't fit a role's model."""
    reason = f"no {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
    return PlanError.of(
        "checkpoint-model",
        f"the weights of '{role}' in the checkpoint do not fit the model that would load them",
        found=reason,
        expected="a checkpoint of the same model",
        remedy="fork with the --model and --backend of the run that wrote the checkpoint (the null backend "
        "writes no weights), or start from a model: rlflow run FLOW --model FOLDER",
    )


def restore(context: RunContext, snapshot: Snapshot) -> RunStart:
    """Restore a snapshot in a prepared run, and return where to continue from.

    Raises PlanError if the data has changed or a role is missing.
    """
    restore_models(context, snapshot)
    engine, state = context.engine, snapshot.state.get("memory", {})
    memory = restored(engine.memory, state, _files(snapshot, MEMORY), engine)
    context.engine.flow_state = FlowState(snapshot.state["flow_state"], memory)
    context.prompts.load(snapshot.state["prompts"])
    if context.ahead is not None and snapshot.state["queue"]:
        context.ahead.restore(snapshot.state["queue"], _files(snapshot, QUEUE))
    before, here = (
        Accuracy(**accuracy) if (accuracy := snapshot.state.get(name)) else None
        for name in ("before", "here")
    )
    return RunStart(snapshot.iteration, before, snapshot.state["answers"], here)


def _files(snapshot: Snapshot, folder: str) -> dict[str, bytes]:
    """Return the contents of the files in a folder of a snapshot, by name."""
    start = f"{folder}/"
    return {name.removeprefix(start): data for name, data in snapshot.files.items() if name.startswith(start)}
