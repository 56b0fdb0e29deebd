"""Bind environments to roles. Each environment runs in processes of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlflow.author.figures import Cause
from rlflow.compiler.graph.model import Graph, Op, used_nodes
from rlflow.config.options import Options
from rlflow.data.json_fields import Wanted
from rlflow.errors import PlanError, Reason
from rlflow.processes.clients import outages
from rlflow.rewards.confinement import Confinement
from rlflow.rewards.environments.environment_pool import EnvironmentPool
from rlflow.rewards.environments.environment_spec import EnvironmentSpec, parse_environment
from rlflow.rewards.worker_pool import OnOutput

Specs = Mapping[str, EnvironmentSpec]  # role → environment; "" is any role that samples


def environments_of(named: Mapping[str, Mapping[str, Any]]) -> dict[str, EnvironmentSpec]:
    """Return the environments given with ``--env`` and ``--ROLE.env``, by role.

    ``named``: settings by role, as in ``RunConfig.environments``. Raises PlanError for an environment that
    doesn't exist, or for settings without an environment.
    """
    specs = {}
    for role, values in named.items():
        flag = f"{role}.env" if role else "env"
        settings = {name: value for name, value in values.items() if name}
        written = values.get("")
        if written is None:
            raise PlanError.of(
                "env-unknown",
                f"--{flag}.{next(iter(settings))} is a setting of an environment, but none is given",
                found=f"no --{flag}",
                expected=f"--{flag} FILE.py:Class",
                remedy=f"--{flag} FILE.py:Class, or leave it out",
            )
        specs[role] = parse_environment(str(written), settings, flag)
    return specs


def default_rewards(named: tuple[str, ...], specs: Specs) -> tuple[str, ...]:
    """Return the rewards that the user named, or the default reward if there are none.

    The default is the environment's score if it gives one, otherwise the data's own scorer.
    """
    return named or (("env",) if any(spec.source.scores for spec in specs.values()) else ("task",))


def wanted_fields(wanted: Wanted, specs: Specs) -> Wanted:
    """Return the data fields that rewards and environments read. ``wanted``: those that rewards read."""
    names = {name: True for spec in specs.values() for name in spec.source.required}
    optional = {name: False for spec in specs.values() for name in spec.source.optional}
    rest = any(spec.source.rest for spec in specs.values())
    return replace(wanted, names={**optional, **names, **wanted.names}, everything=wanted.everything or rest)


def sampling_roles(graph: Graph) -> list[str]:
    """Return the roles that sample, in the order in which they first do so."""
    return list(
        dict.fromkeys(node.role for node in used_nodes(graph) if node.op is Op.GENERATE and node.role)
    )


def by_role(specs: Specs, graph: Graph) -> dict[str, EnvironmentSpec]:
    """Return the environment of each role that samples, by role, leaving out roles without one."""
    return {
        role: spec for role in sampling_roles(graph) if (spec := specs.get(role) or specs.get("")) is not None
    }


class Environments:
    """The environments of a run's roles, each with its own processes, which start with the first episodes."""

    def __init__(self, specs: Specs, graph: Graph, options: Options) -> None:
        allowed = Confinement(
            options.reward_env, options.reward_write, options.reward_network, options.reward_memory
        )
        self.pools = {
            role: EnvironmentPool(spec, allowed, clock=outages.clock)
            for role, spec in by_role(specs, graph).items()
        }

    def reasons(self) -> dict[Cause, Reason]:
        """Return the first reason seen for each cause of failed episodes."""
        return {Cause(cause): why for pool in self.pools.values() for cause, why in pool.failures.items()}

    def on_output(self, on_output: OnOutput) -> None:
        """Call ``on_output`` with everything that environments print from now on. Several threads call it."""
        for pool in self.pools.values():
            pool.on_output = on_output

    def pids(self) -> list[int]:
        """Return the process ids of all environment processes that are running."""
        return [pid for pool in self.pools.values() for pid in pool.pids()]

    def close(self) -> None:
        """Stop all environment processes."""
        for pool in self.pools.values():
            pool.close()


def single_rank(specs: Specs, graph: Graph, tensor: Mapping[str, int]) -> None:
    """Raise PlanError if several ranks sample the same rows of a role that has an environment.

    Each rank would have its own copy of the environment, and they could give different answers. ``tensor``:
    how many tensor-parallel ranks each role's generator has.
    """
    for role, spec in by_role(specs, graph).items():
        if tensor.get(role, 1) > 1:
            raise PlanError.of(
                "env-ranks",
                f"the generator of '{role}' samples each row on {tensor[role]} ranks, but its environment "
                "needs a single rank",
                place=spec.place,
                found=f"tensor_parallel = {tensor[role]}",
                expected="1",
                remedy=f"--{role}.generator.tensor-parallel 1",
            )
