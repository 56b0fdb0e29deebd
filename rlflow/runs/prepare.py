"""Prepare a run: make data, rewards, models and a plan from a flow and a configuration.

All configuration errors are reported before a model is loaded.
"""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rlflow.author.columns import SOURCE
from rlflow.author.figures import Cause
from rlflow.author.flow import Flow
from rlflow.author.node_options import UpdateOptions
from rlflow.checkpoints.model_files import small_files
from rlflow.compiler.check.checker import check
from rlflow.compiler.check.staleness import stale_problems
from rlflow.compiler.graph.ancestry import expected_rows
from rlflow.compiler.graph.model import Graph, RoleUse, used_nodes
from rlflow.compiler.graph.wire import identity
from rlflow.compiler.plan import Plan
from rlflow.compiler.preview.sizes import Assumed, Sizes
from rlflow.compiler.trace.compile import Program, TraceOptions, reads_prompt_id, trace
from rlflow.config.flags import NULL, RunConfig
from rlflow.config.options import Options
from rlflow.config.roles import rewards as bound
from rlflow.config.roles.asking import asking
from rlflow.config.roles.backends import device_of, numbers
from rlflow.config.roles.bound import Roles, bind_roles, folders
from rlflow.config.roles.environments import (
    Environments,
    Specs,
    default_rewards,
    environments_of,
    single_rank,
    wanted_fields,
)
from rlflow.config.roles.evaluation_sets import open_sets
from rlflow.config.roles.loaded_models import make_models, trainer_alone
from rlflow.config.roles.opened_data import open_dataset
from rlflow.config.roles.prompt_room import boundaries, longest_row
from rlflow.config.roles.replies import reply_problems, stop_problems
from rlflow.config.roles.tool_prompts import encoder_with_tools, with_tools, with_tools_of
from rlflow.data import hub
from rlflow.data.dataset import Dataset
from rlflow.data.ends import NONE, Variables, ends_of
from rlflow.data.prompts import Prompts
from rlflow.errors import FlowError, PlanError, Problem, Reason, listed
from rlflow.execution.engine import Scorer
from rlflow.execution.executor import Executor
from rlflow.execution.local_engine import LocalEngine
from rlflow.execution.offload_manager import OffloadManager
from rlflow.execution.queues import Queues
from rlflow.extras import VERSION, ask
from rlflow.monitoring.reporter import Quiet
from rlflow.monitoring.secrets import redacted, telling
from rlflow.processes.clients import outages
from rlflow.processes.watchdog.beside import Watchdog
from rlflow.rewards.reward_spec import parse_reward, readers, weights
from rlflow.rewards.worker_pool import in_worker
from rlflow.runs.context import EngineInputs, RunContext, Runtime
from rlflow.runs.depends import Dependencies, Sources, find_dependencies, named_rewards, unreadable
from rlflow.runs.evaluate import Evaluation, FlowEvaluation, HeldOutSet
from rlflow.runs.guards import make_weight_check, screen_records
from rlflow.runs.held_out import HeldOut, evaluated_role, evaluations, flow_evaluation, usable_sets
from rlflow.runs.model_lines import model_lines
from rlflow.runs.planning import (
    PlacedRoles,
    crowd_warnings,
    make_plan,
    place_roles,
    pool_warnings,
    settle_evaluation,
    unmeasured,
)
from rlflow.runs.run_services import reserved_gpus, services_of, with_urls
from rlflow.runs.trust import FILE_DIGEST, digest_of
from rlflow.services.running import Services
from rlflow.training import pretrained
from rlflow.training.protocols import ResizesPasses, Trainer

QUIET = Quiet()


Judge = Callable[[Graph, Dependencies], Dependencies]


def accept(graph: Graph, dependencies: Dependencies) -> Dependencies:
    """Return the dependencies unchanged. A new run has no earlier dependencies to compare them with."""
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
    """Make everything that a run needs.

    ``note``: called with progress messages. ``judge``: called with the graph and the dependencies before any
    model is loaded; it returns the dependencies, possibly with more digests. It is None if the run will never
    be resumed. ``begun``: true if the run started earlier; bad records are then skipped. ``data``: a data set
    to use instead of the configured data. ``folder``: as for ``services_of``. Raises FlowError and PlanError,
    and the errors of ``judge``.
    """
    if in_worker():
        raise PlanError.of(
            "run-in-worker",
            "importing a reward's file starts a run",
            found="a run inside a reward process",
            expected="a file that only defines functions and classes",
            remedy='put the run under: if __name__ == "__main__":',
        )
    options = config.options
    gpus = reserved_gpus(config.services, config.options)
    torch.set_num_threads(options.threads or torch.get_num_threads())
    specs = environments_of(config.environments)
    report = check(flow, hp, first_options(options, config.sampling, specs), with_variants=False)
    if report.program is None or not report.ok:
        raise FlowError(*report.errors)
    if options.ray_address is None:  # a cluster may have GPUs although its driver has none
        device_of(options.device)
    for name in config.models.values():
        hub.complete_model(name, note)
    placed = place_roles(report.program, bind_roles(report.program.graph, config), config)
    for warning in crowd_warnings(placed):
        note(str(warning))
    for line in model_lines(placed.roles, reward_folders(options.reward), options.dtype):
        note(line)
    if placed.placement is not None and not placed.placement.threads:
        ask("ray", "cluster")
    for line in unrepeatable(specs) if begun else ():
        note(line)
    tools = with_tools_of(specs)
    telling = partial(encoder_with_tools, spec=tools)
    if data is None:
        data = open_dataset(
            flow, config, lambda source: wanted_fields(placed.rewards.wanted(source), specs), telling
        )
    for line in filter(None, (data.recognised, *placed.rewards.forms())):
        note(line)
    for problem in replies(report.program, placed, config.tokenizer_folder, data, specs):
        note(str(problem))
    note_warnings(filter(None, [data.templated()]), note)
    rewards, watchdog = (
        bound.Rewards(placed.rewards, data, options, config.tokenizer_folder),
        Watchdog.start(),
    )
    services = services_of(
        config.services, config.places, gpus, folder, config.options.ray_address is not None, watchdog, note
    )
    try:
        traced_with = trace_options(options, config.sampling, data, rewards, specs)
        program = with_urls(compile_with_data(flow, hp, traced_with, note), config.urls)
        note_warnings(report.of_functions, note)
        data = replace(data, numbered=reads_prompt_id(program.graph), encoder=with_tools(data, tools))
        opened = partial(
            open_sets,
            options,
            config.data,
            config.tokenizer_folder,
            lambda name: wanted_fields(placed.rewards.wanted_of_set(name), specs),
            telling=telling,
        )
        prompts, kept_out = screen_records(data, program.graph, placed.roles, options, note, begun)
        sets = usable_sets(program.graph, placed.roles, options, opened, note, begun)
        held_out = HeldOut(
            kept_out, {name: replace(each, encoder=with_tools(each, tools)) for name, each in sets.items()}
        )
        held = (prompts.data, kept_out, *sets.values())
        if longest := rotated_rows(options, config.data.get("max_prompt"), placed, program.graph, held, note):
            config = config.with_option("longest_row", longest)
            placed = replace(placed, options=config.options)
        for line in amounts(prompts.data, options.prompts):
            note(line)
        return _assemble(
            program, placed, config, prompts, held_out, rewards, watchdog, note, judge, traced_with, services
        )
    except BaseException:
        rewards.close()
        services.close()
        watchdog.close()
        raise


def unrepeatable(specs: Specs) -> Iterator[str]:
    """Yield a message for each environment that cannot replay episodes.

    A run with such an environment may sample different rows after it is resumed.
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

    Returns 0 if no model's do, or if the length is unknown. Raises PlanError if --longest-row is shorter than
    the longest row of the data.
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


def reward_folders(written: Iterable[str]) -> dict[str, Path]:
    """Return the folders of the reward models among the rewards of a run, by the reward's name."""
    return {spec.name: Path(spec.path) for spec in map(parse_reward, written) if spec.kind == "model"}


def replies(
    program: Program, placed: PlacedRoles, tokenizer: str | None, data: Dataset, specs: Specs
) -> list[Problem]:
    """Return warnings and notes about chat templates and stop tokens in the models' folders.

    Raises PlanError if a template lacks something that the flow needs, and for stop tokens that a model does
    not have.
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
    """Trace the flow with the columns that the data have, and return the program.

    Warnings are passed to ``note``. Raises FlowError.
    """
    traced = trace(flow, hp, options)
    program = traced.sound()
    note_warnings(traced.problems, note)
    return program


def amounts(training: Dataset, prompts: int) -> Iterator[str]:
    """Yield messages about the shares of data sources, and about data with too few records."""
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
    """Pass the warnings among the problems to ``note``."""
    for problem in problems:
        if problem.severity == "warning":
            note(str(problem))


def first_options(options: Options, sampling: Mapping[str, Mapping[str, Any]], specs: Specs) -> TraceOptions:
    """Return the options that shape the graph of a run, before its data are opened. See ``trace_options``."""
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
    )


def trace_options(
    options: Options,
    sampling: Mapping[str, Mapping[str, Any]],
    data: Dataset,
    rewards: bound.Rewards,
    specs: Specs = MappingProxyType({}),
) -> TraceOptions:
    """Return the options that shape the graph of a run, once its data are open.

    ``sampling``: as ``RunConfig.sampling``. ``specs``: role → environment.
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
    )


def _assemble(
    program: Program,
    placed: PlacedRoles,
    config: RunConfig,
    prompts: Prompts,
    held_out: HeldOut,
    rewards: bound.Rewards,
    watchdog: Watchdog,
    note: Callable[[str], None],
    judge: Judge | None,
    traced_with: TraceOptions,
    services: Services,
) -> RunContext:
    graph, options, training, roles = program.graph, config.options, prompts.data, placed.roles
    sets = held_out.judged(rewards) if graph.evaluation is None else ()
    evaluated = evaluated_role(graph, roles, sets, options)
    if nobody := unmeasured(graph, roles, options) if sets else "":
        note(nobody)
    placed = settle_evaluation(placed, program, evaluated)
    plan = make_plan(program, placed)
    for warning in pool_warnings(plan, Sizes.of(graph, Assumed(options.prompts))):
        note(str(warning))
    dependencies = (
        judge(
            graph,
            depends_on(
                program, placed, config.tokenizer_folder, training, held_out, traced_with.environments
            ),
        )
        if judge
        else None
    )
    files = {
        name: kept_files(role.folder, role.use.head == "logprobs", role.variables)
        for name, role in roles.items()
        if name in graph.changed_roles
    }
    for folder in folders(roles.values()):
        if code := pretrained.named_code(folder):
            note(f"{folder} names Python code of its own, which is not run: {listed(code)}")
    environments = Environments(traced_with.environments, graph, options)
    inputs = EngineInputs(
        prompts, asking(graph, roles, config, traced_with.environments), config.sampling, environments.pools
    )
    single_rank(
        traced_with.environments, graph, {name: role.generator.can.tensor for name, role in roles.items()}
    )
    services.start()  # services start while models are loaded
    updates = {
        name: expected_steps(graph, role.use, options.prompts, options.iterations)
        for name, role in roles.items()
    }
    if options.pools:
        from rlflow.runs.pools import worker_setups  # a run in one process does not load it

        runtime = _loader(plan, placed, watchdog, note)(
            worker_setups(program, config, training, traced_with, updates), inputs
        )
    else:
        runtime = _in_process(plan, placed, inputs, updates, rewards)

    def on_output(on_output: Callable[[bytes], object]) -> None:
        rewards.on_output(on_output)
        environments.on_output(on_output)
        runtime.engine.on_output(on_output)

    def stop() -> None:
        rewards.close()  # closed first, because a queue may be waiting for a score
        environments.close()
        runtime.close()

    def reasons() -> dict[Cause, Reason]:
        return {**runtime.reasons(), **environments.reasons()}

    executor = Executor(runtime.engine, runtime.queues, outages.clock, services.away)
    try:
        services.ready()
    except BaseException:
        stop()
        raise
    return RunContext(
        plan=runtime.plan,
        engine=runtime.engine,
        executor=executor,
        prompts=prompts,
        options=options,
        evaluation=_evaluation(runtime.plan, placed, executor, held_out, sets),
        settings=recorded_settings(program, config),
        files=files,
        inputs=dependencies,
        reasons=reasons,
        stop=stop,
        watchdog=watchdog,
        ahead=runtime.ahead,
        workers=runtime.workers,
        weight_check=make_weight_check(roles, runtime.engine, training, options),
        on_output=on_output,
        services=services,
        alone=_alone(plan, roles, options, updates),
        unmeasured=nobody,
        resizing=frozenset(name for name, role in roles.items() if role.trainer.offers(ResizesPasses)),
    )


def _alone(
    plan: Plan, roles: Roles, options: Options, updates: Mapping[str, int]
) -> dict[str, Callable[[], Trainer]]:
    """Role → a function that makes its trainer in this process, for each role that several ranks train."""
    if plan.placement is None:
        return {}
    several = {role for role, pool in plan.placement.trainers.items() if plan.placement.pools[pool] > 1}
    trained = {name: role for name, role in roles.items() if role.use.trained and name in several}
    return {name: partial(trainer_alone, role, options, updates[name]) for name, role in trained.items()}


def _evaluation(
    plan: Plan, placed: PlacedRoles, executor: Executor, held_out: HeldOut, sets: tuple[HeldOutSet, ...]
) -> Evaluation | FlowEvaluation | None:
    """The evaluation of the run; None without held-out prompts, or if no reward scores them."""
    if plan.evaluation is not None:
        return flow_evaluation(executor, plan, held_out.data)
    if placed.evaluated is None or not sets:
        return None
    return evaluations(
        plan, placed.roles, placed.evaluated, executor.engine, executor.queues, held_out, sets, placed.options
    )


def depends_on(
    program: Program,
    placed: PlacedRoles,
    tokenizer: str | None,
    training: Dataset,
    held_out: HeldOut,
    specs: Specs = MappingProxyType({}),
) -> Dependencies:
    """Find everything that the run's numbers depend on, besides its settings and its graph."""
    rewards = named_rewards([use.name for use in program.graph.roles if use.rewards], placed.rewards)
    sources = Sources(
        Path(program.flow.place.path),
        placed.roles,
        rewards,
        training,
        held_out.data,
        tokenizer,
        held_out.sets,
        tuple(specs.values()),
    )
    return find_dependencies(sources, placed.options)


def kept_files(folder: Path | None, replies: bool, variables: Variables = NONE) -> dict[str, bytes]:
    """Return the small files of a role's model folder, as name → content; {} without a folder.

    They are copied into checkpoints and final models, so the folder is not needed later. ``replies``: whether
    the model generates text; its generation config must then name all tokens that end a reply. ``variables``:
    the variables of its chat template. Raises PlanError if a file cannot be read.
    """
    if folder is None:
        return {}
    try:
        files = {path.name: path.read_bytes() for path in small_files(folder)}
    except OSError as error:
        raise unreadable(folder, error) from error
    return files | (ends_of(folder, variables).written(files) if replies else {})


def _loader(
    plan: Plan, placed: PlacedRoles, watchdog: Watchdog, note: Callable[[str], None]
) -> Callable[[Any, EngineInputs], Runtime]:
    """Return the function that loads the models of pools, in threads of this process or on Ray."""
    if placed.where.threads:
        from rlflow.runs.pools import in_threads

        return partial(in_threads, plan, placed.options)
    from rlflow.runs.ray_pools import on_ray  # needs Ray

    return lambda setups, inputs: on_ray(plan, placed, setups, inputs, watchdog, note)


def _in_process(
    plan: Plan, placed: PlacedRoles, inputs: EngineInputs, updates: Mapping[str, int], rewards: bound.Rewards
) -> Runtime:
    """Make the models of a run in this process."""
    graph, options, roles = plan.graph, placed.options, placed.roles
    used = {node.role for node in used_nodes(graph)}
    judges = [use.name for use in graph.roles if use.name not in roles and use.name in used]
    scorers: dict[str, Scorer] = {name: rewards.scorer(name, plan.program.weighed) for name in judges}
    device = device_of(options.device)
    offload_manager = OffloadManager.of(plan.residency)
    queues = Queues()  # models are made in a thread that ends afterwards, together with its OpenMP threads
    models = queues.do(
        "control",
        partial(make_models, roles.values(), options, device, updates, loaded=offload_manager.loaded),
    )
    engine = LocalEngine(
        models,
        scorers,
        options.seed,
        inputs.prompts.take,
        {slot.name: slot.initial for slot in graph.state},
        iterations=options.iterations,
        reward_timeout=options.reward_timeout,
        offloads=offload_manager,
        dtype=numbers(options.dtype),
        asking=inputs.asking,
        sampling=inputs.sampling,
        environments=inputs.environments,
    )
    scorers |= {name: bound.ModelScore(engine, name) for name, role in roles.items() if role.use.rewards}
    queues.do("control", partial(rewards.load_models, device, options))
    return Runtime(plan, engine, queues, rewards.reasons, queues.close)


def expected_steps(graph: Graph, use: RoleUse, prompts: int, iterations: int) -> int:
    """Return the number of optimizer steps of a role over the run.

    Learning-rate schedules that end need this number. If a `repeat` keeps fewer rows than expected, the role
    takes fewer steps.
    """
    steps, expected = 0, expected_rows(graph, prompts, repeats="prompts")
    for node in graph.nodes:
        if isinstance(update := node.settings, UpdateOptions) and node.role == use.name:
            per_pass = -(-expected[node.axis] // update.minibatch) if update.minibatch is not None else 1
            steps += per_pass * update.epochs * max(iterations - update.after, 0)
    return steps


def working_folder() -> str | None:
    """Return the folder that relative paths in the settings start from; None if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def recorded_settings(program: Program, config: RunConfig) -> Mapping[str, Any]:
    """Return the content of settings.json: everything needed to resume or repeat the run.

    A secret that is a default in the flow's own file is not copied.
    """
    default = vars(program.flow.parameters.hp) if program.flow.parameters.hp is not None else {}
    hp = {
        name: value for name, value in program.graph.hp if not (telling(name) and value == default.get(name))
    }
    stale = stale_problems(program, config.options.staleness)
    waived = [f"{problem.message}: {problem.found}" for problem in stale if problem.code == "stale-waived"]
    return redacted(
        {
            "rlflow": VERSION,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "started_in": working_folder(),
            "flow": program.flow.name,
            "file": program.flow.place.path,
            "graph": identity(program.graph),
            FILE_DIGEST: digest_of(Path(program.flow.place.path)),
            "hp": hp,
            "options": dataclasses.asdict(config.options),
            **({"stale_ok": waived} if waived else {}),
            "values": {name: value for name, value in config.values.items() if not name.startswith("hp.")},
        }
    )
