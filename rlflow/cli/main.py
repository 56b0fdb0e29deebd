"""`rlflow` and its commands. Errors exit with the contract's codes and never with a traceback of ours."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rlflow.cli import serve
from rlflow.errors import FlowError, PlanError, RunHeld, StageError
from rlflow.monitoring import terminal
from rlflow.monitoring.command_line import taken
from rlflow.monitoring.secrets import guard
from rlflow.processes.watchdog import launcher
from rlflow.processes.watchdog.signals import ending_at_once

app = typer.Typer(
    name="rlflow",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(serve.app)
WITH_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True}
File = Annotated[
    str, typer.Argument(help="FILE, FILE::flow, or the name of an installed algorithm", show_default=False)
]


def _version(wanted: bool) -> None:
    if wanted:
        from rlflow.extras import VERSION

        print(f"rlflow {VERSION}")
        raise typer.Exit


@app.callback()
def top(
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Reinforcement-learning algorithms for language models as checked, overlapped dataflow graphs."""


@app.command(context_settings=WITH_FLAGS)
def check(context: typer.Context, file: File) -> None:
    """Judge an algorithm's data flow, at its settings and with each changed alone. Takes the flags of
    `run`."""
    from rlflow.cli.check import check_file

    raise typer.Exit(check_file(file, context.args))


@app.command(context_settings=WITH_FLAGS)
def prove(context: typer.Context, file: File) -> None:
    """Show on a few rows of a run, before it begins, that it would learn from what it is paid for. Takes the
    flags of `run`, which `rlflow run FILE --help` lists; exit 2 where something is falsified. With --as
    "FLAGS" --as "FLAGS", run the file under each of two plans and say in what they differ first."""
    from rlflow.cli.prove import prove_file

    raise typer.Exit(prove_file(file, context.args))


@app.command(context_settings=WITH_FLAGS)
def graph(
    context: typer.Context,
    file: File,
    format: Annotated[str, typer.Option("--format", help="text, mermaid, dot, svg or json")] = "text",
) -> None:
    """Print the graph of one iteration. Takes the flags of `run`, of which --hp.NAME and --reward shape
    it."""
    from rlflow.cli.plan import print_graph

    raise typer.Exit(print_graph(file, format, context.args))


@app.command(context_settings=WITH_FLAGS)
def plan(context: typer.Context, file: File) -> None:
    """Print what a run would do: who runs where and when, what moves, what lies in memory. Takes the flags of
    `run`; starts nothing."""
    from rlflow.cli.plan import plan_file

    raise typer.Exit(plan_file(file, context.args))


@app.command(context_settings=WITH_FLAGS)
def job(context: typer.Context, file: File) -> None:
    """Print what starts this run on a cluster: --for skypilot, kuberay or ray. Takes the flags of `run`, and
    --job.nodes,
    --job.accelerators, --job.cpus, --job.image, --job.keep PLACE, --job.secret NAME of a variable. Starts nothing."""
    from rlflow.cli.job import print_job

    raise typer.Exit(print_job(file, context.args))


@app.command(context_settings=WITH_FLAGS)
def data(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(help="a .jsonl or .parquet file, a dataset folder, or a task", show_default=False)
    ],
) -> None:
    """Print what a model reads of the data: fields, lengths, what is left out, rows with their ids. Takes
    --model FOLDER, --rows COUNT,
    --json, and --data.NAME as `run` does."""
    from rlflow.cli.data import show_data

    raise typer.Exit(show_data(file, context.args))


@app.command()
def diff(first: File, second: File) -> None:
    """Print what differs between two algorithms; exit 1 where something does."""
    from rlflow.cli.plan import print_diff

    raise typer.Exit(print_diff(first, second))


@app.command("import")
def import_(
    project: Annotated[str, typer.Argument(help="verl or openrlhf", show_default=False)],
    file: Annotated[
        str, typer.Argument(help="a script that starts its trainer, or of verl a .yaml", show_default=False)
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="the configuration file to write")] = "run.toml",
) -> None:
    """Write a configuration file from a script of another project, and say what became of each of its
    settings."""
    from rlflow.cli.new import import_settings

    raise typer.Exit(import_settings(project, Path(file), Path(out)))


@app.command()
def new(
    name: Annotated[
        str, typer.Argument(help="the file to write, or its name without .py", show_default=False)
    ],
    source: Annotated[
        str | None,
        typer.Option("--from", help="a shipped algorithm to copy under the new name", show_default=False),
    ] = None,
) -> None:
    """Write a commented algorithm to start from, or with --from a copy of a shipped one."""
    from rlflow.cli.new import write_new

    raise typer.Exit(write_new(Path(name), source))


@app.command(context_settings=WITH_FLAGS, add_help_option=False)
def run(context: typer.Context, file: Annotated[str, typer.Argument(show_default=False)] = "") -> None:
    """Run an algorithm. `rlflow run FILE --help` lists every setting with its default and what it does."""
    from rlflow.cli.run import run_file

    raise typer.Exit(run_file(file, context.args, context.get_help))


Run = Annotated[str, typer.Argument(help="a run's folder, or its name in runs/", show_default=False)]


@app.command(context_settings=WITH_FLAGS)
def resume(
    context: typer.Context,
    run: Run,
    fork: Annotated[
        bool, typer.Option("--fork", help="start a new run from the checkpoint, with other settings")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="execute files that the run names and that may not be yours")
    ] = False,
) -> None:
    """Go on with a stopped run from its newest good checkpoint. Takes --iterations, intervals and trackers;
    with --fork any flag."""
    from rlflow.cli.resume import resume_run

    raise typer.Exit(resume_run(run, context.args, fork, trust))


@app.command("eval", context_settings=WITH_FLAGS)
def evaluate(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            help="a model folder, a run's folder, its name in runs/, or a checkpoint", show_default=False
        ),
    ],
    checkpoint: Annotated[
        int | None, typer.Option("--checkpoint", help="of a run, by its iterations", show_default=False)
    ] = None,
    out: Annotated[
        str, typer.Option("--out", help="the folder that gets a folder with the answers")
    ] = "evaluations",
    trust: Annotated[
        bool, typer.Option("--trust", help="execute files that the run names and that may not be yours")
    ] = False,
) -> None:
    """Measure a model on held-out prompts: a run on its own and on sets of --eval, with the numbers that the
    run has. Takes --eval NAME=FILE, --eval-samples, --reward, --json, --max-tokens for a model folder, and
    flags of `run`."""
    from rlflow.cli.eval import evaluate as evaluate_model

    raise typer.Exit(evaluate_model(what, context.args, checkpoint, out, trust))


@app.command()
def export(
    run: Run,
    out: Annotated[str, typer.Argument(help="the folder to write", show_default=False)],
    role: Annotated[str | None, typer.Option("--role", help="which model, where the run has several")] = None,
) -> None:
    """Write a plain Hugging Face folder from a run's newest good checkpoint."""
    from rlflow.cli.resume import export_model

    raise typer.Exit(export_model(run, out, role))


@app.command()
def runs(
    folder: Annotated[str, typer.Argument(help="the folder that holds runs")] = "runs",
    sort: Annotated[
        str, typer.Option("--sort", help="a setting, a metric, or run, flow, state, iteration, updated")
    ] = "updated",
    where: Annotated[
        list[str] | None,
        typer.Option("--where", help="a condition, such as hp.samples=8; several must all hold"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the runs as a line of JSON")] = False,
) -> None:
    """List runs with their state, their last numbers and the settings in which they differ, the highest of
    --sort last."""
    from rlflow.cli.watch import list_runs

    raise typer.Exit(list_runs(folder, sort, where or [], as_json))


@app.command()
def compare(
    runs: Annotated[
        list[str], typer.Argument(help="folders of runs, or their names in runs/", show_default=False)
    ],
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="a metric to draw too; may be given several times")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as a line of JSON")] = False,
) -> None:
    """Print in which settings runs differ, their curves over one another, and what can be said of them."""
    from rlflow.cli.compare import compare_runs

    raise typer.Exit(compare_runs(runs, metric or [], as_json))


@app.command()
def show(run: Run) -> None:
    """Print a run's story: settings, learning, curves, last numbers, notes and files."""
    from rlflow.cli.watch import show_run

    raise typer.Exit(show_run(run))


@app.command()
def explain(
    run: Run,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="print a line of JSON: findings with evidence and thresholds, and times"),
    ] = False,
) -> None:
    """Say why a run learns slowly or not at all, with the evidence and the setting that would change it; then
    what bounded its time."""
    from rlflow.cli.watch import explain_run

    raise typer.Exit(explain_run(run, as_json))


@app.command()
def watch(
    run: Run, once: Annotated[bool, typer.Option("--once", help="print one picture and end")] = False
) -> None:
    """Follow a run from another terminal until it ends; exit 1 where it does not end well."""
    from rlflow.cli.watch import watch_run

    raise typer.Exit(watch_run(run, once))


@app.command()
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            help="a TOML file, or the name of a shipped suite; trust, for the history of gates; record",
            show_default=False,
        ),
    ],
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            help="after trust: folders of comparisons; after record: a file of answers", show_default=False
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", help="the folder of what is measured; bench/SUITE; of record the file"),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="no turn begins after this time, such as 25m")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one line of JSON")] = False,
    markdown: Annotated[
        str | None, typer.Option("--markdown", help="write the table and the verdicts to a file, too")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="show the cells beside those of another comparison's folder"),
    ] = None,
) -> None:
    """Compare runs, engines, schedules or other systems: cells that take turns, and verdicts with intervals.
    A killed one goes on."""
    from rlflow.cli.bench import bench as run_bench
    from rlflow.cli.bench import record_lengths, trust_folders

    if suite == "trust":
        raise typer.Exit(trust_folders(folders or []))
    if suite == "record":
        raise typer.Exit(record_lengths(folders or [], out))
    if folders:
        raise typer.BadParameter(f"one suite at a time, found {folders[0]} too")
    raise typer.Exit(run_bench(suite, out, budget, json, markdown, against))


@app.command()
def doctor() -> None:
    """Say what is installed, what of it can be used, and what listens."""
    from rlflow.cli.watch import print_doctor

    raise typer.Exit(print_doctor())


RUNS = ("run", "resume")  # commands that may take long, and run other people's code


def main() -> None:
    """The entry point. 0 done · 1 a stage failed · 2 the user's file, settings or placement · 3 run held ·
    130 interrupted."""
    share_cores()
    terminal.open_all()
    words = taken()  # before there are two processes that show them
    runs = words[:1] in ([name] for name in RUNS)
    if runs and (code := launcher.apart()) is not None:
        leave(code)
    with terminal.steady(), ending_at_once() if runs else contextlib.nullcontext():
        code = exit_code(words)
        launcher.done(code)
        leave(code)


def exit_code(words: list[str]) -> int:
    """Run a command and say on standard error what went wrong; its exit code."""
    try:
        code = called(words)
    except BrokenPipeError:  # `rlflow plan … | head`
        code = unread()
    except KeyboardInterrupt as stop:
        code = _told(stop, 130)  # one that has begun says what is saved
    except RunHeld as error:
        code = _told(error, 3)
    except (FlowError, PlanError) as error:
        code = _told(error, 2)
    except StageError as error:
        code = _told(error, 1)
    except OSError as error:
        code = _told(_system(error), 2)
    except Exception as error:
        code = _usage(error)
    return code


def called(words: list[str]) -> int:
    """The command that was asked for, printed without secrets. Past typer's own `main`, which keeps to itself
    what a stopped run says of going on."""
    command = typer.main.get_command(app)
    guard(sys.stdout, sys.stderr)
    try:
        with command.make_context("rlflow", words) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0


def unread() -> int:
    """Nobody reads what is printed, so the rest goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def share_cores() -> None:
    """Let OpenMP threads that wait for each other's next operation sleep after some hundred microseconds,
    before torch asks: with libgomp's milliseconds a run stands still where other processes want the same
    cores, its own rewards among them."""
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def leave(code: int) -> None:
    """Exit. After a failure a stage may still be running in a thread that nothing can stop, and Python would
    wait or abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (0, 2) and not launcher.leaves_at_once():
        if "triton" not in sys.modules:  # which reports all that is left as leaks
            # else the interpreter looks once more for garbage in all modules, which takes a third of a second
            gc.freeze()
        sys.exit(code)
    os._exit(code)


def _told(error: BaseException, code: int) -> int:
    print(str(error) or "stopped before the run began", file=sys.stderr)
    return code


def _system(error: OSError) -> PlanError:
    """The problem that the system refused a file: a full disk, a limit, a folder that is gone."""
    what = error.strerror or str(error)
    return PlanError.of(
        "system",
        f"the system refused a file: {what}",
        found=str(error.filename or "a file without a name"),
        expected="room, and the rights to read and write it",
    )


def _usage(error: Exception) -> int:
    """click's own complaints about the command line; anything else is a defect of ours and shows its
    traceback."""
    show = getattr(error, "show", None)
    if show is None:
        raise error
    show()
    return 2


if __name__ == "__main__":
    main()
