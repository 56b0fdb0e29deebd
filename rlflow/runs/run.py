"""Start a run: ``rlflow.run``.

With ``--resume auto``, a run that already exists under this name is resumed instead, so a job scheduler can
repeat the same command.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlflow.author.flow import Flow
from rlflow.author.load import load_flow
from rlflow.config.flags import RunConfig, flat
from rlflow.config.hub_values import same_name
from rlflow.errors import PlanError, listed
from rlflow.monitoring.outputs import make_reporter
from rlflow.monitoring.reporter import Reporter
from rlflow.monitoring.secrets import redacted
from rlflow.runs.api import resolve_config
from rlflow.runs.context import RunResult
from rlflow.runs.directory import check_place
from rlflow.runs.prepare import prepare
from rlflow.runs.resume import MAY_CHANGE, masked_values, read_settings, recorded_values, resume
from rlflow.runs.session import start_run


def run(flow: Flow | str, hp: Any = None, *, quiet: bool = True, **keywords: Any) -> RunResult:
    """Run a flow and return the result.

    Example: ``rlflow.run(ppo, PPO(clip=0.1), model=…, data=…, reward=…, iterations=100, actor={"lr":
    1e-5})``.

    Keywords are the flags of `rlflow run`. Give a role's settings as a dict under the role's name. ``hp``:
    the flow's own settings, as an object or a dict. A reward may be a function, as long as it is defined in a
    file. ``quiet``: don't print progress. Raises FlowError, PlanError, StageError, and Interrupted after
    Ctrl-C.
    """
    flow = load_flow(flow) if isinstance(flow, str) else flow
    config, hp = resolve_config(flow, hp, flat(keywords))
    check_place(config.options)
    reporter = make_reporter(quiet, track=config.options.track, metrics_port=config.options.metrics_port)

    def start() -> RunResult:
        return start_run(prepare(flow, hp, config, reporter.note, folder=Path(config.options.out)), reporter)

    return start_or_resume(flow, hp, config, reporter, start)


def start_or_resume(
    flow: Flow,
    hp: Any,
    config: RunConfig,
    reporter: Reporter,
    start: Callable[[], RunResult],
) -> RunResult:
    """Call ``start``, or resume the run of that name if it exists and ``--resume auto`` is set.

    If the existing run has no checkpoint yet, it starts at its first iteration. Raises whatever ``start`` and
    ``resume`` raise, including RunHeld if the run is in progress in another process, and PlanError with the
    code resume-done if it has finished.
    """
    options = config.options
    if options.resume is None or options.name is None:
        return start()
    folder = Path(options.out) / options.name
    if not os.path.lexists(folder):
        try:
            return start()
        except PlanError as error:
            if error.problems[0].code != "run-exists":
                raise
            reporter.note(f"another process has just started the run '{folder}'; it is resumed here")
    return resume(folder, _changed(folder, flow, hp, config), reporter, begin=True)


def _changed(folder: Path, flow: Flow, hp: Any, config: RunConfig) -> dict[str, Any]:
    """Return those of the given flags whose values differ from the ones of the run in ``folder``.

    A name on the Hub that is given without a commit keeps the commit that the run recorded. Raises PlanError
    if the run uses another algorithm, or if a flag it was started with is missing.
    """
    saved = read_settings(folder)
    if saved["flow"] != flow.name:
        raise PlanError.of(
            "resume-other",
            f"the run '{folder}' uses another algorithm",
            found=f"'{saved['flow']}'",
            expected=f"'{flow.name}'",
            remedy="choose another --name",
        )
    before, given = recorded_values(saved), {**config.values, **_settings(hp, saved["hp"])}
    given |= {
        name: before[name] for name, value in config.written.items() if same_name(value, before.get(name))
    }
    differ = [
        name
        for name in {**before, **given}
        if _text(before.get(name)) != _text(redacted({name: given.get(name)})[name])
    ]
    missing = [name for name in differ if name not in given and name not in MAY_CHANGE]
    if missing:
        raise PlanError.of(
            "resume-setting",
            f"the run '{folder}' was started with --{missing[0]}, which is missing now",
            found=f"no {listed(missing)}",
            expected="the flags that the run was started with",
            remedy="add the flag again, or choose another --name",
        )
    return {name: given[name] for name in [*differ, *masked_values(saved)] if name in given}


def _settings(hp: Any, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flow's settings as flag → value, leaving out those that the run didn't record."""
    return {
        f"hp.{name}": value
        for name, value in (vars(hp) if hp is not None else {}).items()
        if name in recorded
    }


def _text(value: Any) -> str:
    """Return a value as text that looks the same for flags, configuration files and settings.json."""
    if isinstance(value, list | tuple):
        return json.dumps([_text(each) for each in value])
    return value if isinstance(value, str) else json.dumps(value, default=str, sort_keys=True)


def is_done(error: PlanError) -> bool:
    """Return whether the error says that the run has already finished."""
    return error.problems[0].code == "resume-done"
