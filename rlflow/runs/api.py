"""From Python: what keywords and flags configure, and ``rlflow.roles``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Self

from rlflow.author.batch import Batch
from rlflow.author.flow import Flow
from rlflow.author.load import load_flow
from rlflow.author.settings import override_flow
from rlflow.compiler.plan import Plan
from rlflow.compiler.trace.arguments import role_names
from rlflow.compiler.trace.compile import sampling_roles
from rlflow.config.flags import RunConfig, flat, sort_rewards, sort_values
from rlflow.errors import PlanError
from rlflow.execution.eager import Role
from rlflow.monitoring.secrets import remember
from rlflow.processes.addresses import Address, addresses
from rlflow.processes.declare import Service
from rlflow.rewards.reward_spec import from_function
from rlflow.runs.context import RunContext
from rlflow.runs.packaged import beneath
from rlflow.runs.prepare import prepare
from rlflow.runs.run_services import settings_with_urls


def resolve_config(
    flow: Flow, hp: Any, values: Mapping[str, Any], packaged_beneath: bool = True
) -> tuple[RunConfig, Any]:
    """Sort keywords or flags, with the packaged task beneath them, into the configuration of a run and the
    flow's settings. From here on no text of rlflow's repeats their secrets. Raises PlanError."""
    if isinstance(hp, Mapping):
        values, hp = {**{f"hp.{name}": value for name, value in hp.items()}, **values}, None
    remember(values)
    rewards = max(len(sort_rewards(values)[0]), 1)
    names = [name for names in role_names(flow, rewards).values() for name in names]
    if packaged_beneath:
        task = beneath(flow.name, values)
        if hp is not None:  # settings that are passed as an object are meant as they are
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
    config = replace(
        sort_values(written, names, flow.parameters.hp, urls, partial(sampling_roles, flow)), places=places
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
    """A reward as a flag would name it: a function by its file and name. Raises PlanError for one that no
    file defines."""
    if not callable(reward):
        return reward
    spec = from_function(reward)
    return f"{spec.path}:{spec.function}"


def suitable_values(flow: Flow, roles: list[str], values: Mapping[str, Any]) -> dict[str, Any]:
    """The packaged values that this flow can take: a default task knows settings and roles that it may not
    have."""
    hp = flow.parameters.hp
    known = {f"hp.{name}" for name in vars(hp)} if hp is not None else set()
    heads = {"data", "env", *roles}
    return {
        name: value
        for name, value in values.items()
        if name in known or "." not in name or name.partition(".")[0] in heads
    }


class Roles(dict[str, Any]):
    """Role objects by name, for ``flow(batch, **roles)``; ``take(n)`` takes the next prompts, ``close()`` or
    the end of ``with`` ends what was started."""

    def __init__(self, context: RunContext, roles: Mapping[str, Any], hp: Any) -> None:
        super().__init__({**roles, **({"hp": hp} if hp is not None else {})})
        self.prepared = context

    def take(self, count: int | None = None) -> Batch:
        """The next prompts of the data: as many as an iteration of a run takes, or ``count``."""
        return self.prepared.prompts.take(count or self.prepared.options.prompts)

    @property
    def state(self) -> dict[str, float]:
        """The scalars that live across iterations, by name."""
        return self.prepared.engine.state

    @property
    def plan(self) -> Plan:
        """The plan of an iteration, which notebooks show as a picture."""
        return self.prepared.plan

    def close(self) -> None:
        """End everything that was started for the roles."""
        self.prepared.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def roles(flow: Flow | str, hp: Any = None, **keywords: Any) -> Roles:
    """The objects of a run for eager calls, with its seed and data cursor: ``flow(roles.take(), **roles)`` is
    one iteration.

    A flow with ``*rewards`` takes them by position: ``flow(roles.take(), actor, *rewards)``.
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
        {name: Role(name, context.engine, weights.get(name, 1.0)) for name in names},
        settings_with_urls(hp, config.urls),
    )
