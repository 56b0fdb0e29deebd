"""`rlflow check`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.author.flow import Flow
from rlflow.author.load import load_flow
from rlflow.author.settings import override
from rlflow.author.verbs import MODEL_READS
from rlflow.check.check import Report, check
from rlflow.config.flags import RunConfig, parse_flags, read_toml, refuse_stray, sorted_out
from rlflow.config.names import role_types, unfit_values, unknown_names
from rlflow.errors import PlanError, Problem
from rlflow.extras import missing
from rlflow.graph.model import HALVES
from rlflow.rewards.spec import RewardSpec, parse_reward, readers
from rlflow.rewards.text import reads
from rlflow.trace.compile import TraceOptions, role_names
from rlflow.watch.secrets import remember


def check_file(file: str, arguments: Sequence[str]) -> int:
    """Print every finding; 2 where there is an error. Raises FlowError and PlanError for files and flags that do not load."""
    report = judged(file, arguments)
    for problem in report.problems:
        print(problem)
    counts = {level: sum(p.severity == level for p in report.problems) for level in ("error", "warning", "note")}
    found = ", ".join(f"{count} {level}{'s' if count != 1 else ''}" for level, count in counts.items() if count)
    nodes = f"{len(report.program.graph.nodes)} nodes" if report.program else "not traced"
    print(f"{file}: {'ok' if report.ok else 'refused'} ({nodes}{'; ' + found if found else ''})")
    return 0 if report.ok else 2


def judged(file: str, arguments: Sequence[str]) -> Report:
    flow = load_flow(file)
    given = given_flags(flow, parse_flags(arguments))
    hp = settings(flow, given.hp)
    roles = roles_of(flow, given)
    check_names(given, roles)
    if not given.options.pools:
        refuse_stray(roles, given)
    return check(flow, hp, trace_options(given), staleness=given.options.staleness)


def roles_of(flow: Flow, given: RunConfig) -> list[str]:
    return [name for names in role_names(flow, max(len(given.options.reward), 1)).values() for name in names]


def given_flags(flow: Flow, flags: Mapping[str, Any]) -> RunConfig:
    """Flags and the configuration file that they name, flags first."""
    values = dict(flags)
    config = values.pop("config", None)
    values = (read_toml(Path(config)) if config else {}) | values
    remember(values)
    names = [name for names in role_names(flow, max(len(values.get("reward", ())), 1)).values() for name in names]
    return sorted_out({name: value for name, value in values.items() if name not in ("json", "quiet")}, names, flow.parameters.hp)


def settings(flow: Flow, given: Mapping[str, Any]) -> Any:
    """The flow's settings with the given values. Raises PlanError."""
    hp = flow.parameters.hp
    if hp is None and given:
        raise PlanError.of("unknown-setting", f"flow '{flow.name}' has no settings", place=flow.place, found=", ".join(given),
                           expected="no --hp flags", remedy="give the flow a parameter hp=Settings()")
    found = override(hp, given, "hp.") if hp is not None and given else hp
    remember(vars(found) if found is not None else {})
    return found


def trace_options(given: RunConfig) -> TraceOptions:
    """What of the flags shapes the graph, without importing what they name. Raises PlanError for a reward that is not there."""
    rewards = [parse_reward(reward) for reward in given.options.reward]
    found = [name for reward in rewards for name in reward_reads(reward)]
    return TraceOptions(max(len(rewards), 1), tuple(dict.fromkeys(found)) or TraceOptions().reward_reads,
                   reward_places=readers(rewards))  # fmt: skip


def reward_reads(reward: RewardSpec) -> tuple[str, ...]:
    """The columns that a reward reads: of a function its required parameters, from its source."""
    if reward.kind == "function":
        return reads(reward.path, reward.function).required
    return MODEL_READS if reward.kind == "model" else TraceOptions().reward_reads


def check_names(given: RunConfig, roles: Iterable[str]) -> None:
    """Flags of backends and their values, by the sources of their settings, and their packages: `check` loads no backend. Raises
    PlanError."""
    problems: list[Problem] = []
    for role in roles:
        chosen, backends = given.role(role), {half: given.backend(role, half) for half in HALVES}
        types = role_types(backends)
        problems += unknown_names(role, chosen, types, given.every_role, given.own)
        problems += unfit_values(role, chosen, types, given.every_role)
        lacking = (missing(backend, given.options.device) for backend in backends.values())
        problems += [problem for problem in lacking if problem]
    if problems:
        raise PlanError(*dict.fromkeys(problems))
