"""A run's life: its directory and lock, its writers and reporters, and how it ends."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from rlflow import durable
from rlflow.author.flow import Flow
from rlflow.checkpoints.lock import Lock
from rlflow.checkpoints.writer import Writer
from rlflow.config.flags import RunConfig
from rlflow.errors import PlanError, RemoteError, StageError, Stopped
from rlflow.execution.apply import ending
from rlflow.runs import directory, final, identity, state
from rlflow.runs.depends import Dependencies
from rlflow.runs.home import Home, Lost
from rlflow.runs.loop import Loop, RunContext, RunResult, RunStart
from rlflow.runs.records import Records
from rlflow.runs.report import bounded
from rlflow.runs.weights import DigestReader
from rlflow.watch import status, terminal
from rlflow.watch.reporter import Reporter, RunInfo, alarm
from rlflow.watchdog.signals import StopSignals

BEGUN = RunStart()


class Interrupted(KeyboardInterrupt):
    """The run was stopped on request. Its message says where it stands and how to go on."""


def started(prepared: RunContext, flow: Flow, given: RunConfig, reporter: Reporter) -> RunResult:
    """A new run in a directory of its own. What was started is ended whatever happens."""
    with Lock(new_folder(prepared, flow, given)) as lock:
        return carried_on(prepared, lock.folder, reporter, BEGUN)


def new_folder(prepared: RunContext, flow: Flow, given: RunConfig) -> Path:
    """A folder that says what the run is. Raises PlanError; then nothing that was prepared is left."""
    try:
        return directory.create(Path(given.options.out), given.options.name, flow.name, texts(prepared))
    except BaseException:
        prepared.close()
        raise


def texts(prepared: RunContext) -> dict[str, bytes]:
    """The files that say what the run is."""
    known = {identity.FILE: prepared.inputs.identity.encode()} if prepared.inputs else {}
    return known | directory.texts(prepared.settings, prepared.plan.graph)


def carried_on(prepared: RunContext, folder: Path, reporter: Reporter, start: RunStart) -> RunResult:
    """Run from ``start`` in a folder whose lock is held, or finish what is left where all iterations are behind it. Raises Interrupted,
    StageError, PlanError."""

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


def _carried_on(prepared: RunContext, folder: Path, reporter: Reporter, start: RunStart, signals: StopSignals) -> RunResult:
    home, placement, options = Home(folder), prepared.plan.placement, prepared.options
    cleared(folder, reporter)
    records = Records(folder, start.iteration, reporter.note, placement.pools if placement else (),
                      evaluated=start.iteration < options.iterations or start.here is not None)
    writer = Writer(folder, options.keep, on_failure=partial(alarm, reporter), before=records.flush)
    loop = Loop(prepared, records, writer, reporter, partial(state.snapshot, prepared), partial(look, home, prepared, records, reporter))
    inputs = prepared.inputs or Dependencies(identity.Identity(), {})
    reader = DigestReader(inputs.identity, inputs.paths, partial(identify, prepared, inputs, records), reporter.note)
    evaluation = prepared.evaluation
    reporter.start(RunInfo(folder, prepared.plan.graph.name, options.iterations, prepared.settings,
                           len(evaluation.prompts) if evaluation else 0, start.iteration, home.shown))
    prepared.watchdog.watch(folder)
    prepared.executor.board = prepared.watchdog.board
    ended, error = "failed", ""
    try:
        with prepared.watchdog.marking():
            describe(prepared, records)
            reader.start()
            prepared.heard_by(records.rewards.hear)
            result = loop.run(start)
            _saved(writer, home)
            home.look()
            final.write_models(prepared, folder)
        ended = "done"
        return replace(result, shown=home.shown)
    except Stopped:
        ended = "interrupted"
        raise Interrupted(f"stopped; {_saved(writer, home, start)}") from None
    except KeyboardInterrupt:
        ended = "interrupted"
        raise Interrupted(f"stopped at once; {_saved(writer, home, start)}") from None
    except Lost as lost:
        elsewhere = saved_elsewhere(loop, lost)
        error = str(elsewhere)
        raise elsewhere from None
    except Exception as raised:
        failure = _failure(raised, prepared.engine.iteration, _how_to_go_on(writer, home, start))
        error = str(failure)
        if failure is raised:
            raise
        raise failure from raised
    except BaseException as raised:  # such as SystemExit of a backend's
        failure = _failure(RemoteError(ending(raised)), prepared.engine.iteration, _how_to_go_on(writer, home, start))
        error = str(failure)
        raise failure from raised
    finally:
        signals.over = True
        try:
            reader.close()
            writer.close()
            if loop.totals.iterations or not (folder / "bounds.json").exists():  # else an earlier process knew more
                records.bounds(bounded(loop.totals), loop.totals.as_json())
            records.close()
            home.close()
            prepared.stop()
            records.rewards.close()  # the last of it is heard as their processes end
        finally:  # a ctrl-C may come here too, and the terminal must be left in order
            reporter.close(ended, error)  # type: ignore[arg-type]


def _failure(raised: Exception, iteration: int, then: str) -> Exception:
    """What a run says that ends so; what comes from workers between stages, of an evaluation or a save, as the run's own."""
    failure = StageError("", iteration, 0, str(raised)) if isinstance(raised, RemoteError) else raised
    if isinstance(failure, StageError):
        failure.then = then
    return failure


def _how_to_go_on(writer: Writer, home: Home, start: RunStart) -> str:
    """For a run that failed; nothing where there is nothing to go on from."""
    writer.wait(600.0)
    if writer.saved is None and not start.iteration:
        return ""
    newest = f"saved as {writer.saved.name}; " if writer.saved is not None else ""
    return f"{newest}go on with: rlflow resume {home.shown}"


def cleared(folder: Path, reporter: Reporter) -> None:
    """Remove what a process that was killed here left half written."""
    try:
        durable.clear(folder)
    except OSError as error:
        reporter.note(f"what an earlier process left half written stays: {error.strerror} ('{error.filename}')")


def look(home: Home, prepared: RunContext, records: Records, reporter: Reporter) -> None:
    """Between iterations. Raises Lost where the folder is gone; what says what the run is, is written again where somebody deleted it."""
    home.look()
    if not (home.path / directory.SETTINGS).exists():
        reporter.note(f"{directory.SETTINGS} is gone from {home.shown}, and maybe other files: what the run is gets written again")
        describe(prepared, records)


def describe(prepared: RunContext, records: Records) -> None:
    """Have the folder say what the run is now, where it says something else: a resumed run may have more iterations."""
    for name, data in texts(prepared).items():
        try:
            same = durable.read(records.folder / name) == data
        except OSError:
            same = False
        if not same:
            records.whole(name, data, anew=True)


def identify(prepared: RunContext, inputs: Dependencies, records: Records, found: identity.Identity) -> None:
    """Take the identity that has the digests of all weights."""
    prepared.inputs = replace(inputs, identity=found)
    records.whole(identity.FILE, found.encode())


def saved_elsewhere(loop: Loop, lost: Lost) -> PlanError:
    """Save a run whose folder is gone: where that is now, or in a new folder in its place. Without it what was learnt would be lost."""
    prepared = loop.prepared
    try:
        folder = lost.moved or _anew(prepared, lost.folder)
        with Writer(folder, prepared.options.keep) as writer:
            loop.writer = writer
            loop.save(loop.done, prepared.prompts.state())
        where = f"it is saved as {writer.saved}" if writer.saved else f"it could not be saved there: {writer.failures[-1]}"
        remedy = f"rlflow resume {folder}" if writer.saved else "start the run again"
        name, run = prepared.plan.graph.name, prepared.options
        status.write(folder, replace(status.begun(name, run.iterations), state="failed", iteration=loop.done, error=str(lost)))
    except (OSError, PlanError) as error:
        where, remedy = f"it could not be saved anew: {error}", "start the run again"
    return PlanError.of("run-folder-lost", str(lost), found=where, expected="a folder that stays until the run ends", remedy=remedy)


def _anew(prepared: RunContext, folder: Path) -> Path:
    """A folder of the old name, or of a free one where something else has that. Raises PlanError."""
    flow, told = prepared.plan.graph.name, texts(prepared)
    try:
        return directory.create(folder.parent, folder.name, flow, told)
    except PlanError:
        return directory.create(folder.parent, None, flow, told)


def _saved(writer: Writer, home: Home, start: RunStart = BEGUN) -> str:
    """Wait until what was submitted is on the disk; how to go on from it, in words."""
    writer.wait(600.0)
    go_on = f"go on with: rlflow resume {home.shown}"
    if writer.saved is not None:
        return f"saved as {writer.saved.name}; {go_on}"
    return f"nothing new was saved; {go_on}" if start is not BEGUN else "no checkpoint was written by this process"
