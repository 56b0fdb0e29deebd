"""The Python API: configurations, role objects (``rlflow.roles``), and checks of whether a run could start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from rlflow.author.batch import Batch
from rlflow.author.flow import Flow
from rlflow.author.load import load_flow
from rlflow.author.settings import override_flow
from rlflow.compiler.plan import Plan
from rlflow.compiler.trace.arguments import role_names
from rlflow.compiler.trace.compile import Program, sampling_roles
from rlflow.config.flags import NULL, RunConfig, flat, sort_rewards, sort_values
from rlflow.config.hub_values import HUB_FLAGS, resolve_hub_names
from rlflow.config.packaged import packaged_values
from rlflow.config.roles.backends import device_of
from rlflow.config.roles.bound import bind_roles, model_of, model_uses
from rlflow.config.roles.environments import Specs, environments_of, wanted_fields
from rlflow.config.roles.evaluation_sets import open_sets, set_paths
from rlflow.config.roles.opened_data import data_settings, open_dataset, own_settings
from rlflow.config.roles.rewards import RewardNames, Rewards
from rlflow.data.data_spec import parse_sources
from rlflow.data.first_records import Undecided, open_first
from rlflow.errors import FlowError, PlanError, Problem
from rlflow.execution.eager import Role
from rlflow.execution.eager_memory import EagerBuffer, EagerTable
from rlflow.execution.memory.buffers import KeptBuffer
from rlflow.monitoring.secrets import remember
from rlflow.monitoring.trackers import check_tracker
from rlflow.processes.addresses import Address, addresses
from rlflow.processes.declare import Service
from rlflow.rewards.reward_spec import from_function
from rlflow.runs.assemble import bind_rewards
from rlflow.runs.context import RunContext
from rlflow.runs.planning import make_plan, place_roles, problems_before_backends
from rlflow.runs.prepare import compile_with_data, prepare, trace_options
from rlflow.runs.run_services import gpu_shares, settings_with_urls


def resolve_config(
    flow: Flow, hp: Any, values: Mapping[str, Any], use_packaged_task: bool = True, fetch: bool = True
) -> tuple[RunConfig, Any]:
    """Return a run's configuration and its flow's settings.

    ``hp``: the flow's settings as an object or a dict, or None. ``values``: keywords or flags, by name. The
    packaged task fills in missing values, unless ``use_packaged_task`` is false. Names on the Hub are pinned
    to commits, and models are downloaded without their weights, unless ``fetch`` is false. Secrets among the
    values are masked in all output from now on. Raises PlanError for invalid values.
    """
    if isinstance(hp, Mapping):
        values, hp = {**{f"hp.{name}": value for name, value in hp.items()}, **values}, None
    remember(values)
    rewards = max(len(sort_rewards(values)[0]), 1)
    names = [name for names in role_names(flow, rewards).values() for name in names]
    if use_packaged_task:
        task = packaged_values(flow.name, values)
        if hp is not None:  # a settings object is complete: the packaged task does not change it
            task = {name: value for name, value in task.items() if not name.startswith("hp.")}
        values = {**suitable_values(flow, names, task), **values}
    values = {
        name: tuple(map(named_reward, value)) if name == "reward" else value for name, value in values.items()
    }
    places: dict[str, Address] = {}

    def urls(services: Sequence[Service]) -> dict[str, str]:
        places.update(addresses(services))
        return {name: place.url for name, place in places.items()}

    written = {name: value for name, value in values.items() if name not in ("json", "quiet")}
    resolved = resolve_hub_names(written, HUB_FLAGS if fetch else ())
    config = replace(
        sort_values(resolved.local, names, flow.parameters.hp, urls, partial(sampling_roles, flow)),
        places=places,
        values=resolved.values,
        models=resolved.models,
        written=resolved.written(written),
    )
    hp = hp if hp is not None else flow.parameters.hp
    if hp is None and config.hp:
        raise PlanError.of(
            "unknown-setting",
            f"flow '{flow.name}' has no settings",
            place=flow.place,
            found=", ".join(config.hp),
            expected="no --hp flags",
            remedy="give the flow a parameter hp=Settings()",
        )
    hp = override_flow(hp, config.hp) if hp is not None else None
    remember(vars(hp) if hp is not None else {})
    return config, hp


def named_reward(reward: Any) -> Any:
    """Return a reward function as a flag's value, ``FILE:NAME``. Any other value is returned unchanged.

    Raises PlanError if the function isn't defined in a file.
    """
    if not callable(reward):
        return reward
    spec = from_function(reward)
    return f"{spec.path}:{spec.function}"


def suitable_values(flow: Flow, roles: list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the packaged task's values that this flow supports.

    The default task has settings and roles that a flow may not have. ``roles``: the names of the flow's
    roles.
    """
    hp = flow.parameters.hp
    known = {f"hp.{name}" for name in vars(hp)} if hp is not None else set()
    heads = {"data", "env", *roles}
    return {
        name: value
        for name, value in values.items()
        if name in known or "." not in name or name.partition(".")[0] in heads
    }


class Roles(dict[str, Any]):
    """Role objects by name, for calling a flow eagerly: ``flow(roles.take(), **roles)``.

    ``take(n)`` returns the next prompts. ``close()``, or leaving a ``with`` block, stops all processes and
    threads that were started for the roles.
    """

    def __init__(self, context: RunContext, roles: Mapping[str, Any], hp: Any) -> None:
        super().__init__({**roles, **({"hp": hp} if hp is not None else {})})
        self.prepared = context

    def take(self, count: int | None = None) -> Batch:
        """Return the next ``count`` prompts, or as many as one iteration takes.

        With ``prompts_by``, there may be fewer. SkipIteration is raised if the iteration can't draw any.
        """
        return self.prepared.engine.take(count or self.prepared.options.prompts)

    @property
    def state(self) -> dict[str, float]:
        """The numbers that the flow carries over from one iteration to the next, by name."""
        return self.prepared.engine.state

    @property
    def plan(self) -> Plan:
        """The plan of one iteration. Notebooks show it as a picture."""
        return self.prepared.plan

    def close(self) -> None:
        """Stop all processes and threads that were started for the roles."""
        self.prepared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def roles(flow: Flow | str, hp: Any = None, **keywords: Any) -> Roles:
    """Return a flow's role objects, for calling it eagerly.

    ``flow(roles.take(), **roles)`` executes one iteration. The roles use the run's seed, and ``take`` returns
    the data in order. If the flow has ``*rewards``, pass the rewards by position: ``flow(roles.take(), actor,
    *rewards)``. ``keywords``: the flags of `rlflow run`.
    """
    flow = load_flow(flow) if isinstance(flow, str) else flow
    config, hp = resolve_config(flow, hp, flat(keywords))
    context = prepare(flow, hp, config, judge=None)
    names = [
        name for names in role_names(flow, max(len(config.options.reward), 1)).values() for name in names
    ]
    weights = context.plan.program.weights
    return Roles(
        context,
        {name: Role(name, context.engine, weights.get(name, 1.0)) for name in names}
        | {name: _memory(name, context) for name in flow.parameters.memories},
        settings_with_urls(hp, config.urls),
    )


def _memory(name: str, context: RunContext) -> EagerTable | EagerBuffer:
    """Return the object that an eager flow gets for something that it keeps."""
    engine, graph = context.engine, context.plan.graph
    return (
        EagerBuffer(name, engine, graph)
        if isinstance(engine.memory[name], KeptBuffer)
        else EagerTable(name, engine)
    )


# Codes of problems that may not exist on another machine. `rlflow check` only warns about them, since the run
# may be meant for another machine.
OF_THE_MACHINE = ("device", "model-folder", "too-few-gpus")

# Code of missing data, which is only a warning if this machine lacks one of these things too.
NO_FILE = "data-missing"

# Codes of a role without a model, and of a run without data; `rlflow check` needs neither.
UNNAMED = ("no-model", "no-data")

LIGHT = {"local"}  # backends that need no checks of the placement of their own


def refusals(flow: Flow, program: Program, values: Mapping[str, Any]) -> list[Problem]:
    """Return the problems because of which a run of the program would be refused, found without models.

    `rlflow check` and runs call the same functions. If the values name data, the first records are opened.

    ``values``: flag → value, with folders in place of models on the Hub. If this machine lacks a model folder
    or a GPU, the problem is only a warning, and then missing data are too. Backends are imported only if the
    flags name a backend other than ``local``, or set ``--memory``. Raises PlanError if the values are not a
    valid configuration.
    """
    config, _ = resolve_config(flow, None, values, fetch=False)
    decisions = _Decisions(flow, program, config, bool(values.get("data") or values.get("eval")))
    problems = [problem for decide in decisions.before_backends() for problem in _raised(decide)]
    problems += problems_before_backends(program.graph, config.options, lambda role: config.role(role).values)
    named = {name for role in decisions.names for name in config.role(role).backends.values()}
    if not problems and (config.options.memory is not None or named - LIGHT):
        problems += _raised(decisions.plan)
    known = [problem for problem in dict.fromkeys(problems) if problem.code not in UNNAMED]
    elsewhere = any(problem.code in OF_THE_MACHINE for problem in known)
    warned = (*OF_THE_MACHINE, NO_FILE) if elsewhere else OF_THE_MACHINE
    return [replace(each, severity="warning") if each.code in warned else each for each in known]


@dataclass(frozen=True)
class _Decisions:
    """Decisions of a run that need no models, and only the first records of data.

    Each raises PlanError or FlowError if it refuses the run, and Undecided if that needs more records.
    """

    flow: Flow
    program: Program
    config: RunConfig
    with_data: bool  # whether the flags name data or a held-out set; a flow can be checked without

    @property
    def names(self) -> list[str]:
        """The names of the roles with a model."""
        return [use.name for use in model_uses(self.program.graph)]

    def before_backends(self) -> Iterator[Callable[[], object]]:
        """Yield the steps that don't import a backend, as functions."""
        options = self.config.options
        if options.ray_address is None:
            yield partial(device_of, options.device)
        yield partial(gpu_shares, self.config.services, options)
        yield from (partial(check_tracker, name) for name in options.track)
        yield from (partial(model_of, self.config.role(name), options.model) for name in self.names)
        yield partial(set_paths, options, self.names)
        yield self._data_settings
        if self.with_data:
            yield self._data

    def plan(self) -> None:
        """Plan the run. This imports its backends."""
        placed = place_roles(self.program, bind_roles(self.program.graph, self.config), self.config)
        make_plan(self.program, placed)

    def _data_settings(self) -> None:
        sources = [source.name for source in parse_sources(self.config.options.data)]
        sets = [written.partition("=")[0] for written in self.config.options.eval]
        for source in sources:
            data_settings(own_settings(self.config.data, source, [*sources, *sets]), self.flow.data)

    @property
    def _specs(self) -> Specs:
        return environments_of(self.config.environments)

    def _data(self) -> None:
        """Open the first records of the data and of the held-out sets, and bind the rewards to them."""
        config, names = self.config, RewardNames.of(self.config, self.flow)
        data = open_dataset(
            self.flow,
            config,
            lambda source: wanted_fields(names.wanted(source), self._specs),
            opening=open_first,
        )
        rewards = Rewards(names, data, config.options, None)
        try:
            traced_with = trace_options(config.options, config.sampling, data, rewards, self._specs)
            program = compile_with_data(self.flow, self.program.hp, traced_with)
            bind_rewards(program, rewards, self.names)
            self._held_out_sets(program, names, rewards)
        finally:
            rewards.close()

    def _held_out_sets(self, program: Program, names: RewardNames, rewards: Rewards) -> None:
        options = self.config.options
        if options.backend == NULL or program.graph.evaluation is not None:
            return
        sets = open_sets(
            options,
            self.config.data,
            None,
            lambda name: wanted_fields(names.wanted_of_set(name), self._specs),
            self.names,
            opening=open_first,
        )
        for name, data in sets.items():
            rewards.judge_of_set(name, data)


def _raised(decide: Callable[[], object]) -> tuple[Problem, ...]:
    try:
        decide()
    except (FlowError, PlanError) as error:
        return tuple(error.problems)
    except Undecided:
        return ()
    return ()
