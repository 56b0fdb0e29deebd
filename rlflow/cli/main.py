"""`rlflow` and its commands. Errors become a message and an exit code.

rlflow's own errors are shown without a traceback.
"""

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
from rlflow.monitoring.command_line import take_arguments
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
    """Check an algorithm's data flow with its settings, and again with each setting changed alone. Takes the
    flags of `run`."""
    from rlflow.cli.check import check_file

    raise typer.Exit(check_file(file, context.args))


@app.command(context_settings=WITH_FLAGS)
def prove(context: typer.Context, file: File) -> None:
    """Test on a few rows, before a run, whether it would learn from its rewards. Takes the flags of `run`,
    which `rlflow run FILE --help` lists. Exits with 2 if a claim is falsified. With --as "FLAGS" --as
    "FLAGS", run the file under both plans and print where they first differ."""
    from rlflow.cli.prove import prove_file

    raise typer.Exit(prove_file(file, context.args))


@app.command(context_settings=WITH_FLAGS)
def graph(
    context: typer.Context,
    file: File,
    format: Annotated[str, typer.Option("--format", help="text, mermaid, dot, svg or json")] = "text",
) -> None:
    """Print the graph of one iteration. Takes the flags of `run`; --hp.NAME and --reward change the graph."""
    from rlflow.cli.plan import print_graph

    raise typer.Exit(print_graph(file, format, context.args))


@app.command(context_settings=WITH_FLAGS)
def plan(context: typer.Context, file: File) -> None:
    """Print what a run would do: the place and time of each node, the data that moves, the memory that is
    used. Takes the flags of `run`; starts nothing."""
    from rlflow.cli.plan import plan_file

    raise typer.Exit(plan_file(file, context.args))


@app.command(context_settings=WITH_FLAGS)
def job(context: typer.Context, file: File) -> None:
    """Print the job file or command that starts this run on a cluster: --for slurm, skypilot, kuberay or ray.

    Takes the flags of `run`, and --job.nodes, --job.accelerators, --job.cpus, --job.image, --job.time,
    --job.keep PLACE, and the name of a variable by --job.secret. Starts nothing.
    """
    from rlflow.cli.job import print_job

    raise typer.Exit(print_job(file, context.args))


@app.command(context_settings=WITH_FLAGS)
def data(
    context: typer.Context,
    file: Annotated[
        str,
        typer.Argument(
            help="a .jsonl, .json, .parquet, .csv or .tsv file, a dataset folder, a task, or a data set on the Hub",
            show_default=False,
        ),
    ],
) -> None:
    """Print what a model reads from the data: fields, lengths, skipped records, rows with their token ids.
    Takes --model FOLDER, --rows COUNT, --json, and --data.NAME as `run` does.
    """
    from rlflow.cli.data import show_data

    raise typer.Exit(show_data(file, context.args))


@app.command()
def diff(first: File, second: File) -> None:
    """Print the differences between two algorithms; exit with 1 if there are any."""
    from rlflow.cli.plan import print_diff

    raise typer.Exit(print_diff(first, second))


@app.command("import")
def import_(
    project: Annotated[str, typer.Argument(help="verl, openrlhf or trl", show_default=False)],
    file: Annotated[
        str,
        typer.Argument(
            help="a script that starts the project's trainer; for verl also a .yaml", show_default=False
        ),
    ],
    out: Annotated[str, typer.Option("--out", "-o", help="the configuration file to write")] = "run.toml",
) -> None:
    """Write a configuration file from another project's script, and report the result for each of its
    settings."""
    from rlflow.cli.new import import_settings

    raise typer.Exit(import_settings(project, Path(file), Path(out)))


def _recipes(wanted: bool) -> None:
    if wanted:
        from rlflow.cli.recipes import purposes

        for name, purpose in purposes().items():
            print(f"{name:12} {purpose}")
        raise typer.Exit


@app.command()
def new(
    name: Annotated[
        str,
        typer.Argument(help="the file to write, or its name without its extension", show_default=False),
    ],
    source: Annotated[
        str | None,
        typer.Option("--from", help="a shipped algorithm to copy under the new name", show_default=False),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="a shipped configuration file to copy under the new name", show_default=False),
    ] = None,
    show: Annotated[
        bool,
        typer.Option(
            "--list", help="print the recipes and what they are for", callback=_recipes, is_eager=True
        ),
    ] = False,
) -> None:
    """Write a commented algorithm as a starting point, or with --from a copy of a shipped algorithm.

    With --recipe, write a configuration file for a common task instead.
    """
    from rlflow.cli.new import write_new
    from rlflow.cli.recipes import write_recipe

    if recipe is None:
        raise typer.Exit(write_new(Path(name), source))
    if source is not None:
        raise typer.BadParameter("cannot be given together with --from", param_hint="--recipe")
    raise typer.Exit(write_recipe(Path(name), recipe))


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
        bool, typer.Option("--fork", help="start a new run from the checkpoint, with changed settings")
    ] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="execute files that the run names and that may not be yours")
    ] = False,
) -> None:
    """Continue a stopped run from its newest intact checkpoint. Takes --iterations and the flags for
    intervals and trackers; with --fork, takes any flag of `run`.
    """
    from rlflow.cli.resume import resume_run

    raise typer.Exit(resume_run(run, context.args, fork, trust))


@app.command("eval", context_settings=WITH_FLAGS)
def evaluate(
    context: typer.Context,
    what: Annotated[
        str,
        typer.Argument(
            help="a model (folder or name on the Hub), a run's folder, its name in runs/, or a checkpoint",
            show_default=False,
        ),
    ],
    checkpoint: Annotated[
        int | None,
        typer.Option(
            "--checkpoint", help="for a run: the checkpoint after so many iterations", show_default=False
        ),
    ] = None,
    out: Annotated[
        str, typer.Option("--out", help="the folder in which to create a folder with the answers")
    ] = "evaluations",
    trust: Annotated[
        bool, typer.Option("--trust", help="execute files that the run names and that may not be yours")
    ] = False,
) -> None:
    """Measure a model on held-out prompts. A run is measured on its own held-out prompts and its --eval sets,
    as during training. Takes --eval NAME=FILE, --eval-samples, --reward, --json, --max-tokens for a model
    folder, and flags of `run`."""
    from rlflow.cli.eval import evaluate as evaluate_model

    raise typer.Exit(evaluate_model(what, context.args, checkpoint, out, trust))


@app.command()
def export(
    run: Run,
    out: Annotated[str, typer.Argument(help="the folder to write", show_default=False)],
    role: Annotated[
        str | None, typer.Option("--role", help="the model to export, if the run trains several")
    ] = None,
) -> None:
    """Write a plain Hugging Face folder from a run's newest intact checkpoint."""
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
        typer.Option(
            "--where", help="a condition, such as hp.samples=8; if given several times, all must hold"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the runs as a line of JSON")] = False,
) -> None:
    """List runs with their state, last metrics and differing settings, sorted by --sort with the highest
    last.
    """
    from rlflow.cli.watch import list_runs

    raise typer.Exit(list_runs(folder, sort, where or [], as_json))


@app.command()
def compare(
    runs: Annotated[
        list[str], typer.Argument(help="folders of runs, or their names in runs/", show_default=False)
    ],
    metric: Annotated[
        list[str] | None, typer.Option("--metric", help="another metric to draw; may be given several times")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as a line of JSON")] = False,
) -> None:
    """Print the settings in which runs differ, their curves in one chart, and the conclusions that they
    allow.
    """
    from rlflow.cli.compare import compare_runs

    raise typer.Exit(compare_runs(runs, metric or [], as_json))


@app.command()
def show(run: Run) -> None:
    """Print a summary of a run: settings, learning, curves, last metrics, notes and files."""
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
    """Print why a run learns slowly or not at all, with the evidence and the setting to change; then what
    limited its speed."""
    from rlflow.cli.watch import explain_run

    raise typer.Exit(explain_run(run, as_json))


@app.command()
def watch(
    run: Run, once: Annotated[bool, typer.Option("--once", help="print the current state and exit")] = False
) -> None:
    """Follow a run from another terminal until it ends; exit with 1 if it does not end in the state
    "done"."""
    from rlflow.cli.watch import watch_run

    raise typer.Exit(watch_run(run, once))


@app.command()
def bench(
    suite: Annotated[
        str,
        typer.Argument(
            help="a TOML file, the name of a shipped suite, or one of the words trust and record",
            show_default=False,
        ),
    ],
    folders: Annotated[
        list[str] | None,
        typer.Argument(
            help="after trust: folders of comparisons to add to the history of gates; after record: a file of answers",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            help="the folder for the measurements, by default bench/SUITE; for record, the file to write",
        ),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="start no further measurement after this time, such as 25m")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print one line of JSON")] = False,
    markdown: Annotated[
        str | None, typer.Option("--markdown", help="also write the table and the verdicts to this file")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="also show the cells of another comparison's folder"),
    ] = None,
) -> None:
    """Compare runs, engines, schedules or other systems. Their measurements alternate, and verdicts have
    confidence intervals. A comparison that was killed continues when it is started again."""
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
    """Print what is installed, whether it can be used, and which processes listen on the network."""
    from rlflow.cli.watch import print_doctor

    raise typer.Exit(print_doctor())


RUNS = ("run", "resume")  # commands that may run for long and that execute users' code


def main() -> None:
    """Run the command line and exit. Exit codes: 0 done · 1 a stage failed · 2 an error in the user's file,
    settings or placement · 3 another process holds the run · 130 interrupted."""
    share_cores()
    terminal.open_all()
    # before the launcher forks, because this call masks the secrets in the command line that both processes
    # show
    words = take_arguments()
    runs = words[:1] in ([name] for name in RUNS)
    if runs and (code := launcher.apart()) is not None:
        leave(code)
    with terminal.steady(), ending_at_once() if runs else contextlib.nullcontext():
        code = exit_code(words)
        launcher.done(code)
        leave(code)


def exit_code(words: list[str]) -> int:
    """Run a command and return its exit code. Errors are printed to standard error."""
    try:
        code = run_command(words)
    except BrokenPipeError:  # `rlflow plan … | head`
        code = discard_output()
    except KeyboardInterrupt as stop:
        code = _report_error(stop, 130)  # a run that has started raises with a message on what is saved
    except RunHeld as error:
        code = _report_error(error, 3)
    except (FlowError, PlanError) as error:
        code = _report_problems(error, words)
    except StageError as error:
        code = _report_error(error, 1)
    except OSError as error:
        code = _report_error(_file_problem(error), 2)
    except Exception as error:
        code = _report_usage(error)
    return code


def run_command(words: list[str]) -> int:
    """Run a command and return its exit code, with secrets masked in everything it prints.

    This doesn't use typer's own `main`, which would drop the message of a stopped run.
    """
    command = typer.main.get_command(app)
    guard(sys.stdout, sys.stderr)
    try:
        with command.make_context("rlflow", words) as context:
            command.invoke(context)
    except typer.Exit as end:
        return end.exit_code
    return 0


def discard_output() -> int:
    """Discard all further output because nobody reads standard output any more. Returns 1, the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def share_cores() -> None:
    """Make idle OpenMP threads sleep after a few hundred microseconds. Call this before torch is imported.

    libgomp's threads spin for milliseconds by default. If other processes, such as the run's rewards, need
    the same cores, the run would nearly come to a halt.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def leave(code: int) -> None:
    """Exit the process immediately with this code.

    After a failure, a stage may still be running in a thread that can't be stopped. A normal exit would wait
    for it or abort.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (0, 2) and not launcher.leaves_at_once():
        if "triton" not in sys.modules:  # otherwise triton reports all remaining objects as leaks
            # otherwise the interpreter collects garbage in all modules again, which takes a third of a second
            gc.freeze()
        sys.exit(code)
    os._exit(code)


def _report_problems(error: FlowError | PlanError, words: list[str]) -> int:
    """Print an error, with lines of the ``--config`` file where they apply, and return 2."""
    from rlflow.config.config_file import located

    error.problems = located(error.problems, words)
    return _report_error(error, 2)


def _report_error(error: BaseException, code: int) -> int:
    print(terminal.fitted(str(error) or "stopped before the run began", sys.stderr), file=sys.stderr)
    return code


def _file_problem(error: OSError) -> PlanError:
    """Return the error for a file operation that the system refused, such as writing to a full disk."""
    what = error.strerror or str(error)
    return PlanError.of(
        "system",
        f"the operating system refused access to a file: {what}",
        found=str(error.filename or "a file without a name"),
        expected="free space, and permission to read and write the file",
        remedy="free some space, or correct the permissions, and repeat the command",
    )


def _report_usage(error: Exception) -> int:
    """Print click's error about the command line, and return 2.

    Any other error is raised again, because it is a bug in rlflow and needs its traceback.
    """
    show = getattr(error, "show", None)
    if show is None:
        raise error
    show()
    return 2


if __name__ == "__main__":
    main()
