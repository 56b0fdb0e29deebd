"""A run's life: its directory and lock, its writers and reporters, and how it ends."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from rlflow.author.flow import Flow
from rlflow.checkpoints.lock import Lock
from rlflow.checkpoints.writer import Writer
from rlflow.errors import StageError
from rlflow.execution.apply import RemoteError, Stopped, ending
from rlflow.given.flags import Given
from rlflow.runs import directory, state
from rlflow.runs.directory import Records
from rlflow.runs.loop import Loop, Prepared, Result, Start
from rlflow.runs.report import bounded
from rlflow.watch import terminal
from rlflow.watch.reporter import Reporter, RunInfo, alarm
from rlflow.watchdog.signals import StopSignals


class Interrupted(KeyboardInterrupt):
    """The run was stopped on request. Its message says where it stands and how to go on."""


def started(prepared: Prepared, flow: Flow, given: Given, reporter: Reporter) -> Result:
    """A new run in a directory of its own. What was started is ended whatever happens."""
    try:
        folder = directory.create(Path(given.options.out), given.options.name, flow.name)
    except BaseException:
        prepared.close()
        raise
    with Lock(folder):
        return carried_on(prepared, folder, reporter, Start())


def carried_on(prepared: Prepared, folder: Path, reporter: Reporter, start: Start) -> Result:
    """Run from ``start`` in a folder whose lock is held. Raises Interrupted, StageError, PlanError."""

    def ask() -> None:
        if not signals.over:
            prepared.executor.stopping = True
            reporter.note("stopping: what runs now ends first, then the run is saved (ctrl-C again stops now)")

    signals = StopSignals(ask, prepared.watchdog.signals)
    try:
        with terminal.steady(), signals:
            return _carried_on(prepared, folder, reporter, start, signals)
    finally:
        prepared.watchdog.close()


def _carried_on(prepared: Prepared, folder: Path, reporter: Reporter, start: Start, signals: StopSignals) -> Result:
    placement = prepared.plan.placement
    records = Records(folder, start.iteration, reporter.note, placement.pools if placement else ())
    writer = Writer(folder, prepared.options.keep, on_failure=partial(alarm, reporter))
    loop = Loop(prepared, records, writer, reporter, partial(state.snapshot, prepared))
    evaluation = prepared.evaluation
    reporter.start(RunInfo(folder, prepared.plan.graph.name, prepared.options.iterations, prepared.settings,
                           len(evaluation.prompts) if evaluation else 0, start.iteration))
    prepared.watchdog.watch(folder)
    prepared.executor.board = prepared.watchdog.board
    ended, error = "failed", ""
    try:
        with prepared.watchdog.marking():
            records.settings(prepared.settings, prepared.plan.graph)
            result = loop.run(start)
            _saved(writer, folder)
            directory.final_models(prepared, folder)
        ended = "done"
        return result
    except Stopped:
        ended = "interrupted"
        raise Interrupted(f"stopped; {_saved(writer, folder)}") from None
    except KeyboardInterrupt:
        ended = "interrupted"
        raise Interrupted(f"stopped at once; {_saved(writer, folder)}") from None
    except Exception as raised:
        failure = _failure(raised, prepared.engine.iteration, _how_to_go_on(writer, folder, start))
        error = str(failure)
        if failure is raised:
            raise
        raise failure from raised
    except BaseException as raised:  # such as SystemExit of a backend's
        failure = _failure(RemoteError(ending(raised)), prepared.engine.iteration, _how_to_go_on(writer, folder, start))
        error = str(failure)
        raise failure from raised
    finally:
        signals.over = True
        try:
            writer.close()
            records.bounds(bounded(loop.totals), loop.totals.as_json())
            records.close()
            prepared.stop()
        finally:  # a ctrl-C may come here too, and the terminal must be left in order
            reporter.close(ended, error)  # type: ignore[arg-type]


def _failure(raised: Exception, iteration: int, then: str) -> Exception:
    """What a run says that ends so; what comes from workers between stages, of an evaluation or a save, as the run's own."""
    failure = StageError("", iteration, 0, str(raised)) if isinstance(raised, RemoteError) else raised
    if isinstance(failure, StageError):
        failure.then = then
    return failure


def _how_to_go_on(writer: Writer, folder: Path, start: Start) -> str:
    """For a run that failed; nothing where there is nothing to go on from."""
    writer.wait(600.0)
    if writer.saved is None and not start.iteration:
        return ""
    newest = f"saved as {writer.saved.name}; " if writer.saved is not None else ""
    return f"{newest}go on with: rlflow resume {folder}"


def _saved(writer: Writer, folder: Path) -> str:
    """Wait until what was submitted is on the disk; how to go on from it, in words."""
    writer.wait(600.0)
    if writer.saved is None:
        return "no checkpoint was written by this process"
    return f"saved as {writer.saved.name}; go on with: rlflow resume {folder}"
