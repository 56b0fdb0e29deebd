"""Resume a run from its newest intact checkpoint, or fork it to continue as a new run with other settings."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from rlflow.author.load import load_flow
from rlflow.checkpoints import durable
from rlflow.checkpoints.folder import FOLDER as CHECKPOINTS
from rlflow.checkpoints.lock import Lock
from rlflow.checkpoints.reading import Loaded, load_latest
from rlflow.compiler.graph import wire
from rlflow.compiler.graph.diff import diff
from rlflow.compiler.graph.model import SIDES, Graph, Node
from rlflow.config.backend_names import role_types
from rlflow.config.flags import ROLE_KEYWORDS, RoleConfig
from rlflow.config.options import Options
from rlflow.data.data_spec import parse_source
from rlflow.errors import PlanError, listed, nearest
from rlflow.monitoring.reporter import Reporter
from rlflow.monitoring.secrets import MASK
from rlflow.processes.declare import HEAD, command_from, may_change, short
from rlflow.rewards.reward_spec import BUILT_IN
from rlflow.runs import directory, final, state
from rlflow.runs.api import resolve_config
from rlflow.runs.assemble import Judge
from rlflow.runs.context import RunContext, RunResult, RunStart
from rlflow.runs.depends import Dependencies, other_inputs, same_inputs
from rlflow.runs.directory import shown
from rlflow.runs.early_end import BEGUN
from rlflow.runs.prepare import prepare
from rlflow.runs.session import continue_run, new_folder
from rlflow.runs.trust import check_trusted

MAY_CHANGE = (
    "iterations",
    "eval_every",
    "save_every",
    "keep",
    "track",
    "metrics_port",
    "reward_timeout",
    "reward_workers",
    "reward_env",
    "reward_write",
    "reward_network",
    "reward_memory",
    "unsafe_scorers",
    "max_missing",
    "max_mismatch",
    "canary",
    "max_bad",
    "heartbeat",
    "load_timeout",
    "wait_for_nodes",
    "commit_every",
    "ray_address",
    "interface",
    "insecure",
    "memory",
    "resume",
)
PATHS = ("model", "data", "eval", "reward", "env")  # settings, of the run or of a role, that may be paths


def resume(
    folder: Path, changes: Mapping[str, Any], reporter: Reporter, trust: bool = False, begin: bool = False
) -> RunResult:
    """Resume a run. If all its iterations are done, finish what's left to do.

    ``changes``: flags with new values. ``trust``: execute files that the run names even if ``check_trusted``
    has doubts about them, which would otherwise raise PlanError. ``begin``: if the run has no checkpoint,
    start at its first iteration. Raises PlanError if the algorithm, the data, a model folder, a reward or a
    setting that must stay the same has changed, and RunHeld if the run is in progress in another process.
    """
    name, folder = shown(folder.absolute()), folder.absolute()
    saved = read_settings(folder)
    refused = [
        flag
        for flag in changes
        if flag not in MAY_CHANGE
        and flag not in masked_values(saved)
        and not may_change(flag, changes[flag], saved["values"])
    ]
    if refused:
        raise PlanError.of(
            "resume-setting",
            f"a resumed run keeps its settings, but --{refused[0]} is given",
            found=listed(refused),
            expected=f"changes to {listed(MAY_CHANGE, 32)}, and to services except for their commands",
            remedy="rlflow resume RUN --fork … starts a new run with other settings",
        )
    check_trusted(folder, saved, unchanged_settings(saved, changes), trust, reporter)
    with Lock(folder):
        context = prepare_again(
            saved, changes, reporter, partial(same_run, folder, name, saved, reporter), folder
        )
        try:
            start = _first_or_next(folder, name, context, reporter, begin)
        except BaseException:
            context.close()
            raise
        return continue_run(context, folder, reporter, start)


def _first_or_next(folder: Path, name: str, context: RunContext, reporter: Reporter, begin: bool) -> RunStart:
    """Return where to continue from.

    ``begin``: as for ``resume``. Raises PlanError if there's nothing left to do, or if no checkpoint can be
    used.
    """
    if begin and not any((folder / CHECKPOINTS).glob("step-*")):
        reporter.note(f"{name} has no checkpoint yet: the run starts with its first iteration")
        return BEGUN
    start = restore_checkpoint(newest(folder, reporter), context, reporter)
    _something_left(folder, name, start, context, reporter)
    return start


def fork(folder: Path, changes: Mapping[str, Any], reporter: Reporter, trust: bool = False) -> RunResult:
    """Start a new run from another run's checkpoint, with other settings or a changed algorithm.

    ``changes``: flags with new values. ``trust``: as for ``resume``.
    """
    name, folder = shown(folder.absolute()), folder.absolute()
    saved = read_settings(folder)
    check_trusted(folder, saved, unchanged_settings(saved, changes), trust, reporter)
    context = prepare_again(
        saved, {"name": None, **changes}, reporter, partial(other_inputs, folder, reporter), folder.parent
    )
    try:
        start = restore_checkpoint(newest(folder, reporter), context, reporter)
        if not _same_evaluation(saved, context.options):
            start = RunStart(start.iteration)
        _iterations_left(name, start, context.options.iterations)
    except BaseException:
        context.close()
        raise
    new = new_folder(context)
    reporter.note(f"fork of {name} at iteration {start.iteration}")
    with Lock(new):
        return continue_run(context, new, reporter, start)


# options that determine what an evaluation measures, with their defaults
EVALUATION: dict[str, Any] = {"held_out": 512, "eval": [], "eval_samples": 1}


def _same_evaluation(saved: Mapping[str, Any], options: Options) -> bool:
    """Return whether a fork evaluates in the same way as the original run, whose last evaluation is then
    still valid.
    """
    before, now = saved.get("options"), json.loads(json.dumps(dataclasses.asdict(options), default=str))
    return isinstance(before, dict) and all(
        before.get(name, default) == now[name] for name, default in EVALUATION.items()
    )


# keys that settings.json needs to resume a run, with their types
WHAT = {"file": str, "flow": str, "values": dict, "hp": dict}


def read_settings(folder: Path) -> dict[str, Any]:
    """Read a run's settings.json. Raises PlanError if it is missing or incomplete."""
    try:
        settings = json.loads(durable.read(folder / directory.SETTINGS))
    except (OSError, ValueError, RecursionError) as error:
        runs = (
            [str(path.parent) for path in folder.parent.glob("*/settings.json")]
            if folder.parent.is_dir()
            else []
        )
        raise PlanError.of(
            "no-run",
            f"'{folder}' is not a run folder",
            found=f"settings.json: {error}",
            expected="a folder that `rlflow run` made",
            nearest=nearest(str(folder), runs),
            remedy="`rlflow runs` lists all runs",
        ) from error
    lacking = [
        name
        for name, kind in WHAT.items()
        if not isinstance(settings, dict) or not isinstance(settings.get(name), kind)
    ]
    if lacking:
        raise PlanError.of(
            "run-settings",
            f"settings.json of '{folder}' is incomplete",
            found=f"no {listed(lacking)}",
            expected=f"a JSON object with {listed(WHAT)}",
            remedy=f"restore the file from a copy, or get only the model: rlflow export {folder} FOLDER",
        )
    return dict(settings)


def recorded_values(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's configuration, including its flow's settings, as flag → value.

    ``saved``: the content of settings.json.
    """
    return {**saved["values"], **{f"hp.{name}": value for name, value in saved["hp"].items()}}


def unchanged_settings(saved: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the recorded settings not replaced by ``changes``, with paths that work in the current folder."""
    changed = {short(name) for name in changes}
    recorded = {name: value for name, value in recorded_values(saved).items() if short(name) not in changed}
    return anchor_paths(recorded, saved.get("started_in"))


def masked_values(saved: Mapping[str, Any]) -> list[str]:
    """Return the flags whose values are secrets, and therefore masked in settings.json."""
    return [name for name, value in recorded_values(saved).items() if MASK in str(value)]


def prepare_again(
    saved: Mapping[str, Any],
    changes: Mapping[str, Any],
    reporter: Reporter,
    judge: Judge | None = None,
    beside: Path | None = None,
) -> RunContext:
    """Prepare a recorded run again, with changes.

    ``saved``: the content of settings.json. ``judge``: as for ``prepare``. ``beside``: passed to ``prepare``
    as ``folder``. Raises FlowError and PlanError.
    """
    flow = load_flow(f"{saved['file']}::{saved['flow']}")
    missing = [name for name in masked_values(saved) if name not in changes]
    if missing:
        raise PlanError.of(
            "resume-secret",
            f"the run did not record --{missing[0]}, because it is a secret",
            found=listed(missing),
            expected="every secret to be given again",
            remedy=f"rlflow resume RUN --{missing[0]} …",
        )
    recorded = anchor_paths(recorded_values(saved), saved.get("started_in"))
    if not changes.get("pools", "as before"):
        recorded = {name: value for name, value in recorded.items() if not _of_pools(name)}
    config, hp = resolve_config(flow, None, {**recorded, **changes}, use_packaged_task=False)
    bound = [config.role(name) for name in (*config.roles, "")]
    if lost := [flag for flag in _of_former_backends(bound, config.every_role, changes) if flag in recorded]:
        reporter.note(
            f"dropped, because the new backends have no such setting: {listed(f'--{flag} {recorded[flag]}' for flag in lost)}"
        )
        recorded = {name: value for name, value in recorded.items() if name not in lost}
        config, hp = resolve_config(flow, None, {**recorded, **changes}, use_packaged_task=False)
    return prepare(flow, hp, config, reporter.note, judge, begun=True, folder=beside)


def _of_former_backends(
    roles: Sequence[RoleConfig], shared: Iterable[str], changes: Mapping[str, Any]
) -> list[str]:
    """Return the flags for settings that the run's new backends don't have, or [] if no backend changes.

    Flags in ``changes`` are left out. ``shared``: the names of settings that apply to all roles. The last of
    ``roles`` stands for all roles without settings of their own.
    """
    if not any(flag.rpartition(".")[2] in ("backend", *SIDES) for flag in changes):
        return []
    unknown = [
        {name for name in role.values if name not in {*role_types(role.backends), *ROLE_KEYWORDS}}
        for role in roles
    ]
    own = [
        role.flag(name)
        for role, names in zip(roles, unknown, strict=True)
        for name in sorted(names - role.shared)
    ]
    everywhere = [name for name in shared if all(name in names for names in unknown)]
    return [flag for flag in (*own, *everywhere) if flag not in changes]


def anchor_paths(recorded: Mapping[str, Any], start: object) -> dict[str, Any]:
    """Return the settings with relative paths turned into ones that work in the current folder.

    A path that doesn't exist here is taken as relative to ``start``, the folder where the run was started.
    """
    if not isinstance(start, str):
        return dict(recorded)
    recorded = {
        name: command_from(value, start) if name.startswith(f"{HEAD}.") else value
        for name, value in recorded.items()
    }
    paths = {
        name
        for name in recorded
        if not name.startswith(("hp.", "data."))
        # settings of an environment may be paths too
        and (name.rpartition(".")[2] in PATHS or "env" in name.split(".")[:-1])
    }
    anchored = {name: _anchored_data if name in ("data", "eval") else _anchored for name in paths}
    return {
        name: value
        if name not in paths
        else tuple(anchored[name](each, start) for each in value)
        if isinstance(value, list)
        else anchored[name](value, start)
        for name, value in recorded.items()
    }


def _anchored_data(value: Any, start: str) -> Any:
    """Return a data source with a path that works in the current folder.

    The source may have a name before the path and a weight after it.
    """
    if not isinstance(value, str) or _is_there(os.path.join(start, value)):
        return _anchored(value, start)
    source = parse_source(value)
    return source.at(_anchored(source.path, start))


def _anchored(value: Any, start: str) -> Any:
    if not isinstance(value, str):
        return value
    path = value.partition(".py:")[0] + ".py" if ".py:" in value else value
    lost = value not in BUILT_IN and not _is_there(path) and _is_there(os.path.join(start, path))
    return os.path.join(start, value) if lost else value


def _is_there(path: str) -> bool:
    """Return whether a path exists or, for a pattern such as data/*.jsonl, whether any file matches."""
    return os.path.exists(path) or (has_magic(path) and bool(glob(path, recursive=True)))


def _of_pools(flag: str) -> bool:
    """Return whether a flag only has an effect with ``--pools``."""
    return (
        flag in ("pools", "ray_address", "interface")
        or flag.startswith("pools.")
        or flag.rpartition(".")[2] == "pool"
    )


def same_run(
    folder: Path,
    name: str,
    saved: Mapping[str, Any],
    reporter: Reporter,
    graph: Graph,
    dependencies: Dependencies,
) -> Dependencies:
    """Check that a run's algorithm and dependencies are still the same as when it was started.

    Returns the dependencies with all digests known so far. Raises PlanError if something has changed.
    """
    same_algorithm(folder, name, saved, graph, reporter)
    return same_inputs(folder, name, reporter, dependencies)


def same_algorithm(
    folder: Path, name: str, saved: Mapping[str, Any], graph: Graph, reporter: Reporter
) -> None:
    """Raise PlanError, listing the differences, if the graph isn't the one that the run recorded.

    Deadlines of stages may differ.
    """
    try:
        before = timeless(wire.unpack(durable.read(folder / directory.GRAPH)))
    except (OSError, PlanError) as error:
        reporter.note(
            f"{directory.GRAPH} cannot be read: {error.strerror if isinstance(error, OSError) else error.problems[0].found}"
        )
        return _same_identity(name, saved.get("graph"), wire.identity(graph))
    now = timeless(directory.without_secrets(graph))
    if wire.identity(before) == wire.identity(now):
        return None
    changes = [str(line) for line in diff(before, now)]
    raise _changed(name, "\n            ".join(changes))


def _same_identity(name: str, before: object, now: str) -> None:
    """Raise PlanError if the graph's digest isn't the one in settings.json.

    Since only the digest is known, the message can't list the differences.
    """
    if before != now:
        raise _changed(
            name, f"graph {now} instead of {before}; without {directory.GRAPH} the difference is unknown"
        )


def _changed(name: str, differences: str) -> PlanError:
    return PlanError.of(
        "resume-changed",
        "the algorithm has changed since this run was started",
        found=differences,
        expected="the same graph and the same function bodies",
        remedy=f"undo the change, or start a new run from the checkpoint: rlflow resume {name} --fork",
    )


def timeless(graph: Graph) -> Graph:
    """Return the graph without its nodes' deadlines, which a resumed run may change."""
    return dataclasses.replace(graph, nodes=tuple(_timeless(node) for node in graph.nodes))


def _timeless(node: Node) -> Node:
    return dataclasses.replace(node, timeout=0.0, body=timeless(node.body) if node.body else None)


def newest(folder: Path, reporter: Reporter) -> Loaded:
    """Return a run's newest intact checkpoint.

    Damaged checkpoints are reported, and so are files that don't belong in the checkpoint.
    """
    loaded = load_latest(folder)
    for path, reason in loaded.rejected:
        reporter.note(f"skipped {path.name}, which is damaged: {reason}")
    if loaded.ignored:
        reporter.note(f"{loaded.path.name}: ignored files that are not part of it: {listed(loaded.ignored)}")
    return loaded


def restore_checkpoint(loaded: Loaded, context: RunContext, reporter: Reporter) -> RunStart:
    """Restore a checkpoint's state in a prepared run, and return where to continue from."""
    start = context.executor.queues.do("control", partial(state.restore, context, loaded.snapshot))
    reporter.note(f"resuming from {loaded.path.name}")
    return start


def _something_left(
    folder: Path, name: str, start: RunStart, context: RunContext, reporter: Reporter
) -> None:
    """Raise PlanError if the run has finished.

    A run that was stopped between its last iteration and writing its final models hasn't finished.
    """
    iterations = context.options.iterations
    if start.iteration != iterations or final.finished(folder, iterations, state.trained(context)):
        return _iterations_left(name, start, iterations)
    reporter.note(
        "all iterations are done; the run now makes its last evaluation and writes its final models"
    )


def _iterations_left(name: str, start: RunStart, iterations: int) -> None:
    if start.iteration >= iterations:
        raise PlanError.of(
            "resume-done",
            f"the run '{name}' has finished all its iterations",
            found=f"{start.iteration} done, {iterations} configured",
            expected=f"--iterations above {start.iteration}",
            remedy="continue with a larger --iterations N (learning-rate schedules then extend to N); the "
            f"model is in final/, or use rlflow export {name} FOLDER",
        )
