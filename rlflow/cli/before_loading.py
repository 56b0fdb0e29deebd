"""Reject wrong flags, models and data before loading the algorithm's file, which may import torch.

Everything that passes is checked again, and more thoroughly, once the file is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlflow.author.load import target
from rlflow.author.outline import Outline, outline
from rlflow.config.backend_names import SHIPPED, role_types
from rlflow.config.flags import ROLE_KEYWORDS, RunConfig, pool_flag_problems, sort_rewards, sort_values
from rlflow.config.folders import check_model_folders
from rlflow.config.meant import Known, unknown_flag
from rlflow.data.data_spec import parse_sources
from rlflow.data.hub_names import hub_model
from rlflow.data.paths import check_path
from rlflow.errors import PlanError, Problem
from rlflow.monitoring.secrets import remember
from rlflow.processes.declare import in_place, split_services
from rlflow.rewards.reward_spec import model_text, parse_reward
from rlflow.runs.directory import check_place


def check_flags(file: str, values: Mapping[str, Any]) -> None:
    """Raise PlanError if no flow could run with these flags.

    ``file``: the algorithm as the user wrote it. ``values`` holds the flags by name.
    """
    where = target(file)
    remember(values)
    found = outline(where.path, where.flow)
    services, others = split_services(values)
    urls = {service.name: "http://127.0.0.1" for service in services}  # ports are chosen later
    values = {name: in_place(value, urls) for name, value in others.items() if name not in ("json", "quiet")}
    if found is None:  # without the names of roles, there is no telling what a dotted name means
        config = sort_values({name: value for name, value in values.items() if "." not in name}, ())
    else:
        roles = _roles(found, values)
        config = sort_values(values, roles, sampling=lambda: found.sampling)
        PlanError.refuse(_unknown(config, roles, found))
        PlanError.refuse(pool_flag_problems(roles, config))
    check_place(config.options)
    check_model_folders(values)
    _check_rewards(values)
    _check_data(values)


def _roles(found: Outline, values: Mapping[str, Any]) -> list[str]:
    count = max(len(sort_rewards(values)[0]), 1)
    rest = [f"{found.rest}_{i}" for i in range(count)] if found.rest else []
    return [*found.roles, *rest]


def _unknown(config: RunConfig, roles: list[str], found: Outline) -> Iterator[Problem]:
    """Yield a problem for each flag without a role that isn't a setting of any role's backends."""
    each = [config.role(name).backends for name in (*roles, "")]
    if any(name not in SHIPPED for backends in each for name in backends.values()):
        return  # only loading a backend of another package tells whether it exists
    settings = {name for backends in each for name in role_types(backends)} | {*ROLE_KEYWORDS}
    known = Known(found.own, tuple(roles), lambda: found.sampling)
    for name in config.every_role:
        if name not in settings:
            yield unknown_flag(name, settings, known)


def _check_rewards(values: Mapping[str, Any]) -> None:
    for reward in sort_rewards(values)[0]:
        if isinstance(reward, str) and hub_model(model_text(reward)) is None:
            parse_reward(reward)


def _check_data(values: Mapping[str, Any]) -> None:
    data = values.get("data") or ()
    for source in parse_sources((data,) if isinstance(data, str) else tuple(data)):
        check_path(source.path)
