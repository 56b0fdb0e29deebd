"""Reasons to refuse a run although its flow is valid, found without opening data or loading a model.

`rlflow check` and runs call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rlflow.author.flow import Flow
from rlflow.compiler.trace.compile import Program
from rlflow.config.flags import RunConfig
from rlflow.config.roles.backends import device_of
from rlflow.config.roles.bound import bind_roles, model_of, model_uses
from rlflow.config.roles.evaluation_sets import set_paths
from rlflow.config.roles.opened_data import data_settings, own_settings
from rlflow.data.data_spec import parse_sources
from rlflow.errors import PlanError, Problem
from rlflow.monitoring.trackers import check_tracker
from rlflow.runs.api import resolve_config
from rlflow.runs.planning import make_plan, place_roles, problems_before_backends
from rlflow.runs.run_services import gpu_shares

# Codes of problems that may not exist on another machine. `rlflow check` only warns about them, since the run
# may be meant for another machine.
OF_THE_MACHINE = ("device", "model-folder", "too-few-gpus")
UNNAMED = "no-model"  # code of a role without a model; `rlflow check` does not need models
LIGHT = {"local"}  # backends that need no checks of the placement of their own


def refusals(flow: Flow, program: Program, values: Mapping[str, Any]) -> list[Problem]:
    """Return the problems for which a run of the program would be refused.

    ``values``: the flags of the run, by name, with folders in place of models on the Hub. A model folder or
    GPU that this machine does not have is only a warning. Backends are imported only if the flags name a
    backend other than ``local``, or set ``--memory``. Raises PlanError if the values are not a valid
    configuration.
    """
    config, _ = resolve_config(flow, None, values, fetch=False)
    decisions = _Decisions(flow, program, config)
    problems = [problem for decide in decisions.before_backends() for problem in _raised(decide)]
    problems += problems_before_backends(program.graph, config.options, lambda role: config.role(role).values)
    named = {name for role in decisions.names for name in config.role(role).backends.values()}
    if not problems and (config.options.memory is not None or named - LIGHT):
        problems += _raised(decisions.plan)
    known = (problem for problem in dict.fromkeys(problems) if problem.code != UNNAMED)
    return [replace(each, severity="warning") if each.code in OF_THE_MACHINE else each for each in known]


@dataclass(frozen=True)
class _Decisions:
    """Decisions of a run that need no data and no models. Each raises PlanError if it refuses the run."""

    flow: Flow
    program: Program
    config: RunConfig

    @property
    def names(self) -> list[str]:
        """The roles with a model."""
        return [use.name for use in model_uses(self.program.graph)]

    def before_backends(self) -> Iterator[Callable[[], object]]:
        """Yield the decisions that import no backend, as functions."""
        options = self.config.options
        if options.ray_address is None:
            yield partial(device_of, options.device)
        yield partial(gpu_shares, self.config.services, options)
        yield from (partial(check_tracker, name) for name in options.track)
        yield from (partial(model_of, self.config.role(name), options.model) for name in self.names)
        yield partial(set_paths, options, self.names)
        yield self._data_settings

    def plan(self) -> None:
        """Plan the run. This imports the backends."""
        placed = place_roles(self.program, bind_roles(self.program.graph, self.config), self.config)
        make_plan(self.program, placed)

    def _data_settings(self) -> None:
        sources = [source.name for source in parse_sources(self.config.options.data)]
        sets = [written.partition("=")[0] for written in self.config.options.eval]
        for source in sources:
            data_settings(own_settings(self.config.data, source, [*sources, *sets]), self.flow.data)


def _raised(decide: Callable[[], object]) -> tuple[Problem, ...]:
    try:
        decide()
    except PlanError as error:
        return tuple(error.problems)
    return ()
