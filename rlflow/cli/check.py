"""`rlflow check`, and what `graph` and `plan` share with it.

Flags are read without loading backends or rewards.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlflow.author.flow import Flow
from rlflow.author.load import load_flow
from rlflow.author.methods import MODEL_READS
from rlflow.author.settings import override_flow
from rlflow.compiler.check.checker import Report, check
from rlflow.compiler.trace.arguments import role_names
from rlflow.compiler.trace.compile import Program, TraceOptions, sampling_roles
from rlflow.config.backend_names import role_types, setting_problems
from rlflow.config.config_file import located
from rlflow.config.flags import RunConfig, pool_flag_problems, read_flags, sort_rewards, sort_values
from rlflow.config.hub_values import resolve_hub_names
from rlflow.config.meant import Known
from rlflow.config.packaged import packaged, packaged_environment, uses_packaged
from rlflow.config.roles.environments import default_rewards, environments_of
from rlflow.config.roles.replies import reply_problems, stop_problems
from rlflow.config.roles.tool_prompts import template_problems
from rlflow.config.template_kwargs import template_kwargs
from rlflow.data.data_spec import SourceSpec, parse_sources
from rlflow.data.fields import FIELDS
from rlflow.data.hub_names import hub_data
from rlflow.data.records import first_record
from rlflow.errors import PlanError, Problem
from rlflow.extras import missing
from rlflow.monitoring.secrets import remember
from rlflow.monitoring.terminal import fitted
from rlflow.rewards.forms import OPENRLHF
from rlflow.rewards.reward_spec import RewardSpec, check_sources, parse_reward, readers
from rlflow.rewards.text import reads
from rlflow.runs.directory import check_place


def check_file(file: str, arguments: Sequence[str]) -> int:
    """Check the flow in a file and print every finding. Returns 2 if any is an error, else 0.

    Raises FlowError and PlanError if the file or the flags can't be loaded.
    """
    report = check_flow(file, arguments)
    for problem in located(report.problems, arguments):
        print(fitted(str(problem), sys.stdout))
    counts = {
        level: sum(p.severity == level for p in report.problems) for level in ("error", "warning", "note")
    }
    levels = ", ".join(
        f"{count} {level}{'s' if count != 1 else ''}" for level, count in counts.items() if count
    )
    nodes = f"{len(report.program.graph.nodes)} nodes" if report.program else "not traced"
    print(f"{file}: {'ok' if report.ok else 'refused'} ({nodes}{'; ' + levels if levels else ''})")
    return 0 if report.ok else 2


def check_flow(file: str, arguments: Sequence[str]) -> Report:
    """Check the flow in a file with a run's flags, and return the report.

    Raises FlowError and PlanError if the file or the flags can't be loaded.
    """
    flow = load_flow(file)
    values, unresolved = with_local_models(read_flags(arguments))
    config = read_config(flow, values)
    hp = settings(flow, config.hp)
    check_place(config.options)
    roles = roles_of(flow, config.options.reward)
    check_names(config, flow, roles)
    PlanError.refuse(pool_flag_problems(roles, config))
    options = trace_options(config)
    default = packaged(flow.name)[1].get("model") if uses_packaged(config.values) else config.tokenizer_folder
    own = {name: str(values["model"]) for name, values in config.roles.items() if "model" in values}
    variables, chat = template_kwargs(config.data), str(config.data.get("chat")).lower() != "false"

    def bound(program: Program) -> Iterator[Problem]:
        yield from template_problems(program.graph, default, own, options.environments, variables)
        yield from reply_problems(program.graph, default, own, options.environments, chat, variables)
        yield from stop_problems(program, default, own)

    report = check(flow, hp, options, staleness=config.options.staleness, bound=bound)
    if report.program is None or not report.ok:
        return report

    # loads torch, which is not needed for a flow that has already been refused
    from rlflow.runs.api import refusals

    written = {name: value for name, value in values.items() if name not in ("json", "quiet")}
    more = [
        problem
        for problem in refusals(flow, report.program, written)
        if not (unresolved and problem.code == "model-folder")
    ]
    return replace(report, problems=(*report.problems, *unresolved, *more))


def with_local_models(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Replace models on the Hub with folders. Returns the new values and a warning for each unknown model.

    The folders have configs and tokenizers but no weights. An unknown model is only a warning because the run
    may take place on a machine that can fetch it. Raises PlanError if a reward's model is unknown.
    """
    local, problems = dict(values), []
    for name, value in values.items():
        try:
            local |= resolve_hub_names({name: value}, flags=("model", "reward")).local
        except PlanError as error:
            if name.rpartition(".")[2] != "model":
                raise
            local[name] = os.path.join(".", value)  # no longer a name on the Hub
            problems += [replace(problem, severity="warning") for problem in error.problems]
    return local, problems


def roles_of(flow: Flow, rewards: Sequence[str]) -> list[str]:
    """Return the names of a flow's roles.

    A parameter ``*rewards`` stands for one role for each of ``rewards``.
    """
    return [name for names in role_names(flow, max(len(rewards), 1)).values() for name in names]


def read_config(flow: Flow, values: Mapping[str, Any]) -> RunConfig:
    """Sort a command's flags into a ``RunConfig``. Raises PlanError for an unknown or invalid flag."""
    values = packaged_environment(flow.name, values) | dict(values)
    remember(values)
    values = resolve_hub_names(values, flags=("reward",)).local
    names = roles_of(flow, sort_rewards(values)[0])
    return sort_values(
        {name: value for name, value in values.items() if name not in ("json", "quiet")},
        names,
        flow.parameters.hp,
        sampling=partial(sampling_roles, flow),
    )


def settings(flow: Flow, values: Mapping[str, Any]) -> Any:
    """Return the flow's settings, with defaults overridden by ``values``, or None if it has no settings.

    Raises PlanError for values that the flow doesn't accept.
    """
    hp = flow.parameters.hp
    if hp is None and values:
        raise PlanError.of(
            "unknown-setting",
            f"flow '{flow.name}' has no settings",
            place=flow.place,
            found=", ".join(values),
            expected="no --hp flags",
            remedy="give the flow a parameter hp=Settings()",
        )
    changed = override_flow(hp, values) if hp is not None and values else hp
    remember(vars(changed) if changed is not None else {})
    return changed


def trace_options(config: RunConfig) -> TraceOptions:
    """Return the options that shape the graph, from ``--reward``, ``--data`` and ``--ROLE.generate.…``.

    None of the user's code is imported. Raises PlanError for a reward that doesn't exist.
    """
    environments = environments_of(config.environments)
    rewards = default_rewards(config.options.reward, environments)
    specs = [parse_reward(reward) for reward in (rewards if rewards == ("env",) else config.options.reward)]
    sources = parse_sources(config.options.data)
    check_sources(specs, [source.name for source in sources])
    columns = [name for spec in specs for name in reward_reads(spec)]
    read_by_environments = [name for spec in environments.values() for name in spec.source.required]
    fields = (
        record_fields(sources, config.data, [*columns, *read_by_environments])
        if environments or set(columns) - set(OPENRLHF.reads)
        else ()
    )
    return TraceOptions(
        max(len(specs), 1),
        tuple(dict.fromkeys(columns)) or TraceOptions().reward_reads,
        reward_places=readers(specs),
        sampling=config.sampling,
        environments=environments,
        fields=fields,
        weights=tuple(spec.weight for spec in specs),
        prompts_by=config.options.prompts_by,
    )


def record_fields(
    sources: Sequence[SourceSpec], mapped: Mapping[str, Any], wanted: Sequence[str]
) -> tuple[str, ...]:
    """Return the names of the data fields that rewards and environments can read.

    These are the fields in each file's first record, and those mapped by ``--data.NAME`` and
    ``--data.SOURCE.NAME``. Data sets on the Hub and dataset folders aren't opened; they are assumed to have
    all fields in ``wanted``, those that rewards and environments read. Empty if all data comes from tasks.
    Raises PlanError if a file is missing.
    """
    local = [Path(os.path.expanduser(source.path)) for source in sources if hub_data(source.path) is None]
    paths = [path for path in local if path.suffix]
    unopened = len(local) < len(sources) or any(path.is_dir() for path in local)
    if not paths and not unopened:
        return ()
    firsts = [record.fields for path in paths if (record := first_record(path)) is not None]
    names = [
        name.removeprefix(f"{source.name}.")
        for name in mapped
        for source in sources
        if name.startswith(f"{source.name}.")
    ]
    return tuple(
        dict.fromkeys(
            [
                *(str(name) for fields in firsts for name in fields),
                *(name for name in [*mapped, *names] if name not in FIELDS),
                *(wanted if unopened else ()),
            ]
        )
    )


def reward_reads(reward: RewardSpec) -> tuple[str, ...]:
    """Return the columns a reward reads. For a function, these are its required parameters.

    They are read from the function's source without importing it.
    """
    if reward.kind == "function":
        return reads(reward.path, reward.function).required
    if reward.kind == "remote":
        return OPENRLHF.reads
    if reward.kind == "env":
        return ("episode_score",)
    return MODEL_READS if reward.kind == "model" else TraceOptions().reward_reads


def check_names(config: RunConfig, flow: Flow, roles: Sequence[str]) -> None:
    """Check that backends have the settings given for roles, and that required packages are installed.

    Backends aren't loaded; only their source is read. Raises a PlanError that lists all problems.
    """
    problems: list[Problem] = []
    known = Known(config.own, tuple(roles), partial(sampling_roles, flow))
    for role in map(config.role, roles):
        problems += setting_problems(role, role_types(role.backends), known)
        problems += [
            problem
            for backend in role.backends.values()
            if (problem := missing(backend, config.options.device))
        ]
    PlanError.refuse(dict.fromkeys(problems))
