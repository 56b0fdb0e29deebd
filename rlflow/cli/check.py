"""`rlflow check`."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlflow.author.flow import Flow
from rlflow.author.load import load_flow
from rlflow.author.settings import override
from rlflow.check.check import Report, check
from rlflow.errors import PlanError
from rlflow.runs.flags import Given, parse_flags, read_toml, sorted_out
from rlflow.trace.compile import Options, role_names


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
    return check(flow, hp, trace_options(given), staleness=given.options.staleness)


def given_flags(flow: Flow, flags: Mapping[str, Any]) -> Given:
    """Flags and the configuration file that they name, flags first."""
    values = dict(flags)
    config = values.pop("config", None)
    values = (read_toml(Path(config)) if config else {}) | values
    names = [name for names in role_names(flow, max(len(values.get("reward", ())), 1)).values() for name in names]
    return sorted_out({name: value for name, value in values.items() if name not in ("json", "quiet")}, names)


def settings(flow: Flow, given: Mapping[str, Any]) -> Any:
    """The flow's settings with the given values. Raises PlanError."""
    hp = flow.parameters.hp
    if hp is None and given:
        raise PlanError.of("unknown-setting", f"flow '{flow.name}' has no settings", place=flow.place, found=", ".join(given),
                           expected="no --hp flags", remedy="give the flow a parameter hp=Settings()")  # fmt: skip
    return override(hp, given, "hp.") if hp is not None and given else hp


def trace_options(given: Given) -> Options:
    """What of the flags shapes the graph, without importing what they name."""
    rewards = given.options.reward
    reads = tuple(dict.fromkeys(name for reward in rewards for name in reward_reads(reward)))
    return Options(max(len(rewards), 1), reads or Options().reward_reads)


def reward_reads(reward: str) -> tuple[str, ...]:
    """The columns that a reward reads: for ``file.py:function`` its required parameters, read from the source."""
    path, _, rest = reward.partition(".py:")
    if not rest or not Path(f"{path}.py").is_file():
        return Options().reward_reads if not Path(reward).is_dir() else ()
    name = rest.partition(":")[0]
    for node in ast.parse(Path(f"{path}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            required = node.args.args[: len(node.args.args) - len(node.args.defaults)]
            return tuple(argument.arg for argument in required)
    return Options().reward_reads
