"""Prepare a run: make its data, rewards, models and plan from a flow and a configuration.

All configuration errors are reported before a model is loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlflow.author.columns import SOURCE
from rlflow.author.flow import Flow
from rlflow.compiler.check.checker import check
from rlflow.compiler.graph.model import Graph
from rlflow.compiler.trace.compile import Program, TraceOptions, reads_prompt_id, trace
from rlflow.config.flags import NULL, RunConfig
from rlflow.config.options import Options
from rlflow.config.roles import rewards as bound
from rlflow.config.roles.backends import device_of
from rlflow.config.roles.bound import bind_roles
from rlflow.config.roles.environments import Specs, default_rewards, environments_of, wanted_fields
from rlflow.config.roles.evaluation_sets import open_sets
from rlflow.config.roles.opened_data import open_dataset
from rlflow.config.roles.prompt_room import boundaries, longest_row
from rlflow.config.roles.replies import reply_problems, stop_problems
from rlflow.config.roles.tool_prompts import encoder_with_tools, with_tools, with_tools_of
from rlflow.data import hub
from rlflow.data.data_spec import parse_sources
from rlflow.data.dataset import Dataset
from rlflow.data.hub_names import local_instead
from rlflow.data.prompts import Prompts
from rlflow.errors import FlowError, PlanError, Problem, listed
from rlflow.extras import ask
from rlflow.monitoring.reporter import Quiet
from rlflow.processes.watchdog.beside import Watchdog
from rlflow.rewards.reward_spec import parse_reward, readers, weights
from rlflow.rewards.worker_pool import in_worker
from rlflow.runs.assemble import Judge, RunParts, assemble
from rlflow.runs.context import RunContext
from rlflow.runs.depends import Dependencies
from rlflow.runs.guards import screen_records
from rlflow.runs.held_out import HeldOut, usable_sets
from rlflow.runs.model_lines import model_lines
from rlflow.runs.planning import PlacedRoles, crowd_warnings, place_roles
from rlflow.runs.run_services import reserved_gpus, services_of, with_urls

QUIET = Quiet()


def accept(graph: Graph, dependencies: Dependencies) -> Dependencies:
    """Return the dependencies unchanged, because a new run has nothing to compare them with."""
    return dependencies


def prepare(
    flow: Flow,
    hp: Any,
    config: RunConfig,
    note: Callable[[str], None] = QUIET.note,
    judge: Judge | None = accept,
    begun: bool = False,
    data: Dataset | None = None,
    folder: Path | None = None,
) -> RunContext:
    """Make everything a run needs.

    ``note``: called with progress messages. ``judge``: called with the graph and the dependencies before any
    model is loaded. It returns the dependencies, possibly with more digests, or raises an error. Use None for
    a run that will never be resumed. ``begun``: whether the run was started earlier; if so, bad records are
    skipped. ``data``: a data set to use instead of the configured one. ``folder``: as for ``services_of``.
    Raises FlowError, PlanError and any error of the ``judge``.
    """
    _refuse_in_worker()
    options = config.options
    gpus = reserved_gpus(config.services, config.options)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    specs = environments_of(config.environments)
    report = check(flow, hp, first_options(options, config.sampling, specs), with_variants=False)
    if report.program is None or not report.ok:
        raise FlowError(*report.errors)
    placed = _placed(report.program, config, note, begun)
    for line in unrepeatable(specs) if begun else ():
        note(line)
    if data is None:
        data = _opened(flow, config, placed, specs)
    _note_data(report.program, placed, config, data, specs, note)
    rewards = bound.Rewards(placed.rewards, data, options, config.tokenizer_folder)
    watchdog = Watchdog.start()
    services = services_of(
        config.services, config.places, gpus, folder, config.options.ray_address is not None, watchdog, note
    )
    try:
        traced_with = trace_options(options, config.sampling, data, rewards, specs)
        program = with_urls(compile_with_data(flow, hp, traced_with, note), config.urls)
        note_warnings(report.of_functions, note)
        prompts, held_out = _records(program.graph, placed, config, data, specs, note, begun)
        held = (prompts.data, held_out.data, *held_out.sets.values())
        if longest := rotated_rows(options, config.data.get("max_prompt"), placed, program.graph, held, note):
            config = config.with_option("longest_row", longest)
            placed = replace(placed, options=config.options)
        for line in amounts(prompts.data, options.prompts):
            note(line)
        return assemble(
            RunParts(
                program,
                placed,
                config,
                prompts,
                held_out,
                rewards,
                services,
                watchdog,
                note,
                judge,
                traced_with,
            )
        )
    except BaseException:
        rewards.close()
        services.close()
        watchdog.close()
        raise


def _refuse_in_worker() -> None:
    """Raise PlanError if this is a reward process, where no run may start."""
    if in_worker():
        raise PlanError.of(
            "run-in-worker",
            "importing a reward's file starts a run",
            found="a run inside a reward process",
            expected="a file that only defines functions and classes",
            remedy='put the run under: if __name__ == "__main__":',
        )


def _placed(program: Program, config: RunConfig, note: Callable[[str], None], begun: bool) -> PlacedRoles:
    """Bind all roles to their configuration and place them on pools. Raises PlanError."""
    if config.options.ray_address is None:  # a cluster may have GPUs although its driver has none
        device_of(config.options.device)
    for name in config.models.values():
        hub.complete_model(name, note)
    placed = place_roles(program, bind_roles(program.graph, config), config)
    for warning in crowd_warnings(placed):
        note(str(warning))
    folders_of_rewards = reward_folders(config.options.reward)
    for line in () if begun else model_lines(placed.roles, folders_of_rewards, config.options.dtype):
        note(line)
    if placed.placement is not None and not placed.placement.threads:
        ask("ray", "cluster")
    return placed


def _opened(flow: Flow, config: RunConfig, placed: PlacedRoles, specs: Specs) -> Dataset:
    """Open a run's data. Raises PlanError."""
    return open_dataset(
        flow,
        config,
        lambda source: wanted_fields(placed.rewards.wanted(source), specs),
        partial(encoder_with_tools, spec=with_tools_of(specs)),
    )


def _note_data(
    program: Program,
    placed: PlacedRoles,
    config: RunConfig,
    data: Dataset,
    specs: Specs,
    note: Callable[[str], None],
) -> None:
    """Tell the user about the data, the rewards and the chat templates. Raises PlanError."""
    for line in filter(
        None, (*local_data(config.options.data), data.split_lines, data.recognised, *placed.rewards.forms())
    ):
        note(line)
    for problem in replies(program, placed, config.tokenizer_folder, data, specs):
        note(str(problem))
    note_warnings(filter(None, [data.templated()]), note)


def _records(
    graph: Graph,
    placed: PlacedRoles,
    config: RunConfig,
    data: Dataset,
    specs: Specs,
    note: Callable[[str], None],
    begun: bool,
) -> tuple[Prompts, HeldOut]:
    """Return a cursor over the training records, and the records that the run doesn't train on.

    Raises PlanError for records that a model can't handle.
    """
    options, tools = config.options, with_tools_of(specs)
    data = replace(data, numbered=reads_prompt_id(graph), encoder=with_tools(data, tools))
    opened = partial(
        open_sets,
        options,
        config.data,
        config.tokenizer_folder,
        lambda name: wanted_fields(placed.rewards.wanted_of_set(name), specs),
        telling=partial(encoder_with_tools, spec=tools),
    )
    prompts, kept_out = screen_records(data, graph, placed.roles, options, note, begun)
    sets = usable_sets(graph, placed.roles, options, opened, note, begun)
    return prompts, HeldOut(
        kept_out, {name: replace(each, encoder=with_tools(each, tools)) for name, each in sets.items()}
    )


def unrepeatable(specs: Specs) -> Iterator[str]:
    """Yield a message for each environment that can't replay episodes.

    With such an environment, a resumed run may sample different rows.
    """
    for spec in specs.values():
        if not spec.source.repeatable:
            yield (
                f"{spec.name} declares that it cannot replay an episode (repeatable = False): from here on "
                "the run may sample different rows than without the interruption"
            )


def rotated_rows(
    options: Options,
    max_prompt: Any,
    placed: PlacedRoles,
    graph: Graph,
    datasets: Iterable[Dataset],
    note: Callable[[str], None],
) -> int:
    """Return the longest possible row in tokens, if a model's rotary frequencies depend on it.

    Returns 0 if they don't, or if the length is unknown. Raises PlanError if ``--longest-row`` is shorter
    than the longest row in the data.
    """
    folders_of = {name: role.folder for name, role in placed.roles.items()} | reward_folders(options.reward)
    models = {name: found for name, folder in folders_of.items() if (found := boundaries(folder))}
    if not models or options.backend == NULL:
        return 0
    given, known = (
        options.longest_row,
        longest_row(graph, datasets, None if max_prompt is None else int(max_prompt)),
    )
    reaches = [
        reach for found in models.values() for each in found if (reach := each.reach(given)) is not None
    ]
    if given and known > min(reaches, default=known):
        raise PlanError.of(
            "longest-row",
            "rows can be longer than --longest-row, and longer rows use different rotary frequencies",
            found=f"--longest-row {given}",
            expected=f"at least {known}: the longest prompt plus max_tokens",
            remedy=f"--longest-row {known}, or shorter rows",
        )
    longest = given or known
    of = f"rows of at most {longest} tokens" if longest else "the longest rows that its config allows"
    why = (
        ""
        if longest
        else "; the length of follow-up prompts is unknown: give --data.max_prompt or --longest-row TOKENS"
    )
    note(
        f"rotary frequencies of {listed(models)} depend on the longest row: the run computes all passes "
        f"and samples with those for {of}{why}"
    )
    return longest


def local_data(written: Iterable[str]) -> Iterator[str]:
    """Yield a line for each local path in ``written`` that could also be a name on the Hub.

    The line says that the local path is used.
    """
    for source in parse_sources(tuple(written)):
        if local_instead(source.path):
            yield f"data: the local path {source.path} is read, not a data set on the Hub ({source.path}@main)"


def reward_folders(written: Iterable[str]) -> dict[str, Path]:
    """Return the model folder of each reward in ``written`` that is a model, by name."""
    return {spec.name: Path(spec.path) for spec in map(parse_reward, written) if spec.kind == "model"}


def replies(
    program: Program, placed: PlacedRoles, tokenizer: str | None, data: Dataset, specs: Specs
) -> list[Problem]:
    """Return warnings and notes about the models' chat templates and stop tokens.

    Raises PlanError if a template lacks something the flow needs, or if a model doesn't have a stop token.
    """
    folders = {name: role.folder for name, role in placed.roles.items()}
    problems = [
        *reply_problems(
            program.graph, tokenizer, folders, specs, data.wording.chat, data.wording.template_kwargs
        ),
        *stop_problems(program, tokenizer, folders),
    ]
    PlanError.refuse(problem for problem in problems if problem.severity == "error")
    return problems


def compile_with_data(
    flow: Flow, hp: Any, options: TraceOptions, note: Callable[[str], None] = QUIET.note
) -> Program:
    """Trace the flow with the data's columns, and return the program.

    ``note`` is called with warnings. Raises FlowError.
    """
    traced = trace(flow, hp, options)
    program = traced.sound()
    note_warnings(traced.problems, note)
    return program


def amounts(training: Dataset, prompts: int) -> Iterator[str]:
    """Yield messages about the shares of data sources, and about sources that have too few records.

    ``prompts``: how many prompts an iteration takes.
    """
    total = sum(training.weights.values())
    records = (
        Counter(record.more[SOURCE] for record in training.records)
        if training.parts
        else {training.name: len(training)}
    )
    for name, there in records.items():
        quota = float(training.weights[name] / total * prompts) if training.parts else prompts
        if training.parts:
            by = (
                " (--data NAME=FILE:WEIGHT sets another share)"
                if training.weights[name] == len(training.parts[name])
                else ""
            )
            yield (
                f"source {name}: {float(training.weights[name] / total):.1%} of the prompts, from "
                f"{there} records{by}"
            )
        if 0 < there < quota:
            yield (
                f"{name} has {there} record{'s' * (there != 1)} to train on, and an iteration takes "
                f"{quota:.4g}: each record appears about {quota / there:.3g} times per iteration (--prompts)"
            )


def note_warnings(problems: Iterable[Problem], note: Callable[[str], None]) -> None:
    """Call ``note`` with each of the problems that is a warning."""
    for problem in problems:
        if problem.severity == "warning":
            note(str(problem))


def first_options(options: Options, sampling: Mapping[str, Mapping[str, Any]], specs: Specs) -> TraceOptions:
    """Return the options that shape a run's graph, before its data is opened.

    Once it is open, use ``trace_options``.
    """
    reads = (
        ("episode_score",)
        if default_rewards(options.reward, specs) == ("env",)
        else TraceOptions().reward_reads
    )
    wanted = tuple(name for spec in specs.values() for name in (*spec.source.required, *spec.source.optional))
    return TraceOptions(
        max(len(options.reward), 1),
        reads,
        sampling=sampling,
        fields=wanted,
        environments=specs,
        weights=weights(options.reward),
        prompts_by=options.prompts_by,
    )


def trace_options(
    options: Options,
    sampling: Mapping[str, Mapping[str, Any]],
    data: Dataset,
    rewards: bound.Rewards,
    specs: Specs = MappingProxyType({}),
) -> TraceOptions:
    """Return the options that shape a run's graph, once its data is open.

    ``sampling``: as ``RunConfig.sampling``. ``specs``: the environments, by role.
    """
    return TraceOptions(
        max(len(options.reward), 1),
        rewards.reads,
        data.columns,
        readers(rewards.names.named),
        sampling,
        data.known,
        specs,
        weights(options.reward),
        options.prompts_by,
    )
