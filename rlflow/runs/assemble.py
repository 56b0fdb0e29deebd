"""Assemble a run: make its plan, load its models, and start its services."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlflow.author.figures import Cause
from rlflow.author.node_options import UpdateOptions
from rlflow.checkpoints.model_files import small_files
from rlflow.compiler.check.staleness import stale_problems
from rlflow.compiler.graph.ancestry import expected_rows
from rlflow.compiler.graph.model import Graph, RoleUse, used_nodes
from rlflow.compiler.graph.wire import identity
from rlflow.compiler.plan import Plan
from rlflow.compiler.preview.sizes import Assumed, Sizes
from rlflow.compiler.trace.compile import Program, TraceOptions
from rlflow.config.flags import RunConfig
from rlflow.config.options import Options
from rlflow.config.roles import rewards as bound
from rlflow.config.roles.asking import asking
from rlflow.config.roles.backends import device_of, numbers
from rlflow.config.roles.bound import Roles, folders
from rlflow.config.roles.environments import Environments, Specs, single_rank
from rlflow.config.roles.loaded_models import make_models, trainer_alone
from rlflow.data.ends import NONE, Variables, ends_of
from rlflow.data.prompts import Prompts
from rlflow.errors import Reason, listed
from rlflow.execution.engine import Scorer
from rlflow.execution.executor import Executor
from rlflow.execution.local_engine import LocalEngine
from rlflow.execution.memory.prompt_draws import PromptDraws
from rlflow.execution.memory.saved import empty
from rlflow.execution.offload_manager import OffloadManager
from rlflow.execution.queues import Queues
from rlflow.extras import VERSION
from rlflow.monitoring.secrets import redacted, telling
from rlflow.processes.clients import outages
from rlflow.processes.watchdog.beside import Watchdog
from rlflow.runs.context import EngineInputs, RunContext, Runtime
from rlflow.runs.depends import Dependencies, Sources, find_dependencies, named_rewards, unreadable
from rlflow.runs.evaluate import Evaluation, FlowEvaluation, HeldOutSet
from rlflow.runs.guards import make_weight_check
from rlflow.runs.held_out import HeldOut, evaluated_role, evaluations, flow_evaluation, unmeasured
from rlflow.runs.planning import PlacedRoles, make_plan, pool_warnings, settle_evaluation
from rlflow.runs.trust import FILE_DIGEST, digest_of
from rlflow.services.running import Services
from rlflow.training import pretrained
from rlflow.training.protocols import ResizesPasses, Trainer

Judge = Callable[[Graph, Dependencies], Dependencies]


@dataclass(frozen=True)
class RunParts:
    """What is known about a run before it has a plan. Pass it to ``assemble``."""

    program: Program
    placed: PlacedRoles
    config: RunConfig
    prompts: Prompts
    held_out: HeldOut
    rewards: bound.Rewards
    services: Services
    watchdog: Watchdog
    note: Callable[[str], None]
    judge: Judge | None
    traced_with: TraceOptions

    @property
    def specs(self) -> Specs:
        """The environments, by role."""
        return self.traced_with.environments


def assemble(parts: RunParts) -> RunContext:
    """Plan a run, load its models, and return everything it needs.

    Raises PlanError and any error of the judge.
    """
    graph, options, roles = parts.program.graph, parts.config.options, parts.placed.roles
    sets = parts.held_out.judged(parts.rewards) if graph.evaluation is None else ()
    if nobody := unmeasured(graph, roles, options) if sets else "":
        parts.note(nobody)
    placed = settle_evaluation(parts.placed, parts.program, evaluated_role(graph, roles, sets, options))
    plan = make_plan(parts.program, placed)
    for warning in pool_warnings(plan, Sizes.of(graph, Assumed(options.prompts))):
        parts.note(str(warning))
    dependencies = parts.judge(graph, _depends_on(parts, placed)) if parts.judge else None
    files = _model_files(parts)
    updates = {
        name: expected_steps(graph, role.use, options.prompts, options.iterations)
        for name, role in roles.items()
    }
    environments = Environments(parts.specs, graph, options)
    runtime = _runtime(parts, placed, plan, environments, updates)
    started = _Started(parts.rewards, environments, runtime)
    executor = Executor(runtime.engine, runtime.queues, outages.clock, parts.services.away)
    try:
        parts.services.ready()
    except BaseException:
        started.stop()
        raise
    return RunContext(
        plan=runtime.plan,
        engine=runtime.engine,
        executor=executor,
        prompts=parts.prompts,
        options=options,
        evaluation=_evaluation(runtime.plan, placed, executor, parts.held_out, sets),
        settings=recorded_settings(parts.program, parts.config),
        files=files,
        inputs=dependencies,
        reasons=started.reasons,
        stop=started.stop,
        watchdog=parts.watchdog,
        ahead=runtime.ahead,
        workers=runtime.workers,
        weight_check=make_weight_check(roles, runtime.engine, parts.prompts.data, options),
        on_output=started.on_output,
        services=parts.services,
        alone=_alone(plan, roles, options, updates),
        unmeasured=nobody,
        resizing=frozenset(name for name, role in roles.items() if role.trainer.offers(ResizesPasses)),
    )


@dataclass(frozen=True)
class _Started:
    """The running parts of a run, which are stopped together."""

    rewards: bound.Rewards
    environments: Environments
    runtime: Runtime

    def on_output(self, on_output: Callable[[bytes], object]) -> None:
        """Send everything that reward and environment processes print to ``on_output``."""
        self.rewards.on_output(on_output)
        self.environments.on_output(on_output)
        self.runtime.engine.on_output(on_output)

    def stop(self) -> None:
        """Stop the rewards, the environments, and the engine with its queues and pools."""
        self.rewards.close()  # closed first, because a queue may be waiting for a score
        self.environments.close()
        self.runtime.close()

    def reasons(self) -> dict[Cause, Reason]:
        """Return the first message seen for each cause of missing scores."""
        return {**self.runtime.reasons(), **self.environments.reasons()}


def _model_files(parts: RunParts) -> dict[str, dict[str, bytes]]:
    """Return the small files of each role that the run may change, by role.

    If a model folder contains Python code, the user is told that it isn't run.
    """
    roles = parts.placed.roles
    files = {
        name: kept_files(role.folder, role.use.head == "logprobs", role.variables)
        for name, role in roles.items()
        if name in parts.program.graph.changed_roles
    }
    for folder in folders(roles.values()):
        if code := pretrained.named_code(folder):
            parts.note(f"{folder} names Python code of its own, which is not run: {listed(code)}")
    return files


def _runtime(
    parts: RunParts, placed: PlacedRoles, plan: Plan, environments: Environments, updates: Mapping[str, int]
) -> Runtime:
    """Start a run's services, load its models, and return its engine, queues and pools."""
    graph, roles, config = parts.program.graph, placed.roles, parts.config
    inputs = EngineInputs(
        parts.prompts,
        PromptDraws.of(parts.program, parts.prompts),
        asking(graph, roles, config, parts.specs),
        config.sampling,
        environments.pools,
    )
    single_rank(parts.specs, graph, {name: role.generator.can.tensor for name, role in roles.items()})
    parts.services.start()  # services start while models are loaded
    if not config.options.pools:
        return _in_process(plan, placed, inputs, updates, parts.rewards)
    from rlflow.runs.pools import worker_setups  # a run in one process does not load it

    setups = worker_setups(parts.program, config, parts.prompts.data, parts.traced_with, updates)
    return _loader(plan, placed, parts.watchdog, parts.note)(setups, inputs)


def _alone(
    plan: Plan, roles: Roles, options: Options, updates: Mapping[str, int]
) -> dict[str, Callable[[], Trainer]]:
    """For each role trained by several ranks, return a function that makes its trainer in this process."""
    if plan.placement is None:
        return {}
    several = {role for role, pool in plan.placement.trainers.items() if plan.placement.pools[pool] > 1}
    trained = {name: role for name, role in roles.items() if role.use.trained and name in several}
    return {name: partial(trainer_alone, role, options, updates[name]) for name, role in trained.items()}


def _evaluation(
    plan: Plan, placed: PlacedRoles, executor: Executor, held_out: HeldOut, sets: tuple[HeldOutSet, ...]
) -> Evaluation | FlowEvaluation | None:
    """Return the run's evaluation, or None if there are no held-out prompts or no reward can score them."""
    if plan.evaluation is not None:
        return flow_evaluation(executor, plan, held_out.data)
    if placed.evaluated is None or not sets:
        return None
    return evaluations(
        plan, placed.roles, placed.evaluated, executor.engine, executor.queues, held_out, sets, placed.options
    )


def _depends_on(parts: RunParts, placed: PlacedRoles) -> Dependencies:
    """Return everything that affects the run's numbers, other than its settings and its graph."""
    program = parts.program
    rewards = named_rewards([use.name for use in program.graph.roles if use.rewards], placed.rewards)
    sources = Sources(
        Path(program.flow.place.path),
        placed.roles,
        rewards,
        parts.prompts.data,
        parts.held_out.data,
        parts.config.tokenizer_folder,
        parts.held_out.sets,
        tuple(parts.specs.values()),
    )
    return find_dependencies(sources, placed.options)


def kept_files(folder: Path | None, replies: bool, variables: Variables = NONE) -> dict[str, bytes]:
    """Read the small files of a role's model folder, as name → content. Returns {} if ``folder`` is None.

    They are copied to checkpoints and final models, so the folder isn't needed later. ``replies``: whether
    the model generates text; if so, its generation config lists all tokens that end a reply. ``variables``:
    the chat template's variables. Raises PlanError if a file can't be read.
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
    """Return the function that loads models on pools, either in threads of this process or on Ray."""
    if placed.where.threads:
        from rlflow.runs.pools import in_threads

        return partial(in_threads, plan, placed.options)
    from rlflow.runs.ray_pools import on_ray  # needs Ray

    return lambda setups, inputs: on_ray(plan, placed, setups, inputs, watchdog, note)


def _in_process(
    plan: Plan, placed: PlacedRoles, inputs: EngineInputs, updates: Mapping[str, int], rewards: bound.Rewards
) -> Runtime:
    """Load a run's models in this process and return the runtime."""
    graph, options, roles = plan.graph, placed.options, placed.roles
    scorers = bind_rewards(plan.program, rewards, roles)
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
        memory=empty(graph.memory, options.staleness, graph.nodes),
        draws=inputs.draws,
    )
    scorers |= {name: bound.ModelScore(engine, name) for name, role in roles.items() if role.use.rewards}
    queues.do("control", partial(rewards.load_models, device, options))
    return Runtime(plan, engine, queues, rewards.reasons, queues.close)


def bind_rewards(program: Program, rewards: bound.Rewards, models: Collection[str]) -> dict[str, Scorer]:
    """Return the scorer of each role that the flow uses and that has no model.

    ``models``: the roles with a model. Raises PlanError for a reward that does not fit the data.
    """
    used = {node.role for node in used_nodes(program.graph)}
    judges = [use.name for use in program.graph.roles if use.name not in models and use.name in used]
    return {name: rewards.scorer(name, program.weighed) for name in judges}


def expected_steps(graph: Graph, use: RoleUse, prompts: int, iterations: int) -> int:
    """Return how many optimizer steps a role takes during the run.

    Learning-rate schedules that have an end need this number. If a `repeat` keeps fewer rows than expected,
    the role takes fewer steps.
    """
    steps, expected = 0, expected_rows(graph, prompts, repeats="prompts")
    for node in graph.nodes:
        if isinstance(update := node.settings, UpdateOptions) and node.role == use.name:
            per_pass = -(-expected[node.axis] // update.minibatch) if update.minibatch is not None else 1
            steps += per_pass * update.epochs * node.schedule.count(iterations)
    return steps


def working_folder() -> str | None:
    """Return the working directory, or None if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def recorded_settings(program: Program, config: RunConfig) -> Mapping[str, Any]:
    """Return the content of settings.json: everything needed to resume or repeat the run.

    Secrets are masked, or left out if they are defaults in the flow's own file.
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
