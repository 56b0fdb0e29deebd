"""`rlflow run`: train with an algorithm."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.author.flow import Flow
from rlflow.author.load import load_flow
from rlflow.author.settings import described, fields
from rlflow.cli.before_loading import check_flags
from rlflow.compiler.trace.arguments import role_names
from rlflow.config.flags import read_flags
from rlflow.config.options import Options
from rlflow.errors import PlanError
from rlflow.processes.declare import ServiceSettings
from rlflow.rewards.environments.environment_spec import Bounds

if TYPE_CHECKING:
    from rlflow.monitoring.reporter import Reporter
    from rlflow.runs.context import RunResult


def run_file(file: str, arguments: Sequence[str], general_help: Callable[[], str]) -> int:
    """Run the flow in a file, and return the exit code.

    ``general_help`` returns the help to print if there is no file. Raises FlowError, PlanError and
    StageError.
    """
    wants_help = "--help" in arguments or file == "--help"
    if not file or file.startswith("-"):
        print(general_help())
        return 0 if wants_help else 2
    if wants_help:
        print(help_text(file, load_flow(file)))
        return 0
    values = read_flags(arguments)
    check_flags(file, values)
    return _run(load_flow(file), values)


def _run(flow: Flow, values: dict[str, Any]) -> int:
    quiet, as_json = bool(values.pop("quiet", False)), bool(values.pop("json", False))

    from rlflow.monitoring.outputs import make_reporter
    from rlflow.runs.api import resolve_config

    config, hp = resolve_config(flow, None, values)
    reporter = make_reporter(quiet, as_json, config.options.track, metrics_port=config.options.metrics_port)

    from rlflow.config.packaged import uses_packaged
    from rlflow.runs.prepare import prepare  # loads backends, which takes seconds
    from rlflow.runs.run import is_done, start_or_resume
    from rlflow.runs.session import start_run

    def start() -> RunResult:
        if uses_packaged(values):
            reporter.note(packaged_note(flow.name, config.values))
        context = prepare(flow, hp, config, reporter.note, folder=Path(config.options.out))
        if context.prompts.data.worded:
            reporter.note(context.prompts.data.worded)
        return start_run(context, reporter)

    try:
        result = start_or_resume(flow, hp, config, reporter, start)
    except PlanError as error:
        if config.options.resume is None or not is_done(error):
            raise
        reporter.note(str(error))
        return 0
    return report(result, reporter, as_json)


def packaged_note(flow: str, used: Mapping[str, Any]) -> str:
    """Return a line about a flow's packaged task: its data and model. ``used``: all of the run's values."""
    from rlflow.config.packaged import packaged

    return (
        f"task: packaged '{packaged(flow)[0]}' (data {', '.join(used['data'])}, model "
        f"{Path(used['model']).name}), because neither --model nor --data is given; "
        f"`rlflow run {flow} --help` lists its settings"
    )


def report(result: RunResult, reporter: Reporter, as_json: bool) -> int:
    """Print the summary of a finished run. Returns 1 if something couldn't be saved, else 0.

    With ``as_json``, also prints the results as JSON.
    """
    from rlflow.runs.final import summary

    reporter.note(summary(result))
    if as_json:
        print(json.dumps(result.as_json()))
    return 1 if result.unsaved else 0


def help_text(file: str, flow: Flow) -> str:
    """Return the output of `rlflow run FILE --help`: every flag with its type, default and purpose."""
    from rlflow.config.packaged import packaged

    about = flow.function.__doc__ or sys.modules[flow.function.__module__].__doc__ or ""
    task, packaged_values = packaged(flow.name)
    lines = [
        f"rlflow run {file} [--NAME VALUE …]",
        "",
        about.strip(),
        "",
        f"Without --model and --data the run uses the packaged task '{task}'; its values are in parentheses.",
        "",
    ]
    if flow.parameters.hp is not None:
        lines += [
            "The algorithm's settings",
            *_described("hp.", type(flow.parameters.hp), flow.parameters.hp, packaged_values),
            "",
        ]
    lines += [
        "The run",
        *_described("", Options, packaged_values=packaged_values),
        "  --config FILE.toml  the same settings from a file; flags override it",
        "  --json  print a last line of JSON",
        "  --quiet  print only errors",
        "",
    ]
    lines += _data_help()
    lines += [
        (
            "An environment (--env.NAME; with --ROLE.env: --ROLE.env.NAME), in addition to the settings of its "
            "class"
        ),
        *_described("env.", Bounds),
        "",
    ]
    lines += [
        (
            "A service that the run starts (--service.NAME COMMAND, or --service.NAME.FIELD); other flags can "
            "use its URL as {NAME}"
        ),
        *_described("service.NAME.", ServiceSettings),
        "",
    ]
    lines += [
        f"Each role: {', '.join(role_names(flow, 1))} (--ROLE.NAME; without ROLE: all roles)",
        "  --ROLE.model FOLDER  --ROLE.trainer BACKEND  --ROLE.generator BACKEND  --ROLE.reward REWARD",
        (
            "  --ROLE.pool POOL  --ROLE.trainer.pool POOL  --ROLE.generator.pool POOL  with --pools: the pool "
            "of the role, or of its trainer or generator"
        ),
        *_backends(packaged_values),
    ]
    return "\n".join(lines)


def _data_help() -> list[str]:
    return [
        "Data (--data.NAME)",
        "  prompt, answer, completion, chosen, rejected  the file's field for each",
        "  chat true | false  whether to apply the model's chat template to prompts; default: true if it has one",
        (
            "  system TEXT  a system message for chats\n"
            "  template TEXT  text around plain prompts, such as 'Q: {prompt} A:'"
        ),
        "  template_kwargs JSON  variables of the chat template, such as '{\"enable_thinking\": false}'",
        (
            "  max_prompt TOKENS  drop longer prompts\n"
            "  max_records N  read only the first N records of each split\n"
            "  stream true | false  whether to read data on the Hub without a copy on disk; default: false\n"
            "  split NAME  the split to read, if the folder has several\n"
            "  other names  settings of the task"
        ),
        "",
    ]


def _backends(packaged_values: Mapping[str, Any]) -> list[str]:
    from rlflow.config.roles.backends import backend

    local, vllm = backend("local"), backend("vllm")
    return [
        *_described("ROLE.", local.Trainer.Settings, packaged_values=packaged_values),
        *_described("ROLE.", local.Generator.Settings),
        "With --ROLE.generator vllm, instead of batch_tokens",
        *_described("ROLE.", vllm.Generator.Settings),
    ]


def _described(
    prefix: str, settings: type, values: Any = None, packaged_values: Mapping[str, Any] | None = None
) -> list[str]:
    """Return a help line for each flag of a settings class.

    ``prefix`` is added in front of each flag's name. ``values``: the defaults, if they differ from those of
    the class. ``packaged_values``: the values set by the packaged task.
    """
    lines = []
    for entry in fields(settings).values():
        default = getattr(values, entry.name) if values is not None else entry.default
        shown = "" if default is None else f" = {default}"
        name = entry.name if prefix else entry.name.replace("_", "-")
        own = (packaged_values or {}).get(
            entry.name if prefix == "ROLE." else f"{prefix}{entry.name}", default
        )
        own = (
            ", ".join(map(str, own))
            if isinstance(own, list)
            else Path(own).name
            if entry.name == "model" and own
            else own
        )
        other = "" if own == default else f" (packaged task: {own})"
        lines.append(f"  --{prefix}{name} {described(entry.type)}{shown}{other}  {entry.comment}")
    return lines
