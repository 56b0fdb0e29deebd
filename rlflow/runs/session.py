"""A run's life: its directory and lock, its writers and reporters, and how it ends."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlflow import durable
from rlflow.checkpoints.lock import Lock
from rlflow.checkpoints.writer import Writer
from rlflow.errors import FlowError, PlanError, RemoteError, StageError, Stopped, printable
from rlflow.execution.apply import ending
from rlflow.own_lines import noted_lines, whole
from rlflow.proof.claims import encoded, summary
from rlflow.runs import answer_file, directory, final, identity, proving, state
from rlflow.runs.context import RunContext, RunResult, RunStart
from rlflow.runs.depends import Dependencies
from rlflow.runs.home import Home, Lost
from rlflow.runs.loop import Loop
from rlflow.runs.records import Records
from rlflow.runs.report import bounds_text
from rlflow.runs.weights import DigestReader
from rlflow.watch import status, terminal
from rlflow.watch.reporter import Reporter, RunInfo, alarm
from rlflow.watch.secrets import masked
from rlflow.watchdog.signals import StopSignals

BEGUN = RunStart()
PROOF, PROOF_JSON = "proof.txt", "proof.json"  # what the run has proved of itself: for people, and for `rlflow explain`
TRACEBACK = "traceback.txt"  # of what ended the run, where code raised it


class Interrupted(KeyboardInterrupt):
    """The run was stopped on request. Its message says where it stands and how to go on."""


def start_run(context: RunContext, reporter: Reporter) -> RunResult:
    """Start a new run in a folder of its own. Everything that it starts is ended, whatever happens."""
    with Lock(new_folder(context)) as lock:
        return continue_run(context, lock.folder, reporter, BEGUN)


def new_folder(context: RunContext) -> Path:
    """Make a folder that says what the run is. Raises PlanError; then nothing that was context is left."""
    try:
        return directory.create(Path(context.options.out), context.options.name, context.plan.graph.name, texts(context))
    except BaseException:
        context.close()
        raise


def texts(context: RunContext) -> dict[str, bytes]:
    """The files that say what the run is."""
    known = {identity.FILE: context.inputs.identity.encode()} if context.inputs else {}
    return known | directory.texts(context.settings, context.plan.graph)


def continue_run(context: RunContext, folder: Path, reporter: Reporter, start: RunStart) -> RunResult:
    """Run from ``start`` in a folder whose lock is held, or finish what is left where all iterations are behind it. Raises Interrupted,
    StageError, PlanError."""

    def ask() -> None:
        if not signals.over:
            context.executor.stopping = True
            reporter.note("stopping: what runs now ends first, then the run is saved (ctrl-C again stops now)")

    signals = StopSignals(ask, context.watchdog.signals)
    try:
        context.services.settle(folder)
        with terminal.steady(), signals:
            result = _continue(context, folder, reporter, start, signals)
        context.services.close(ended_well=True)
        return result
    finally:
        context.services.close()
        context.watchdog.close()


def _continue(context: RunContext, folder: Path, reporter: Reporter, start: RunStart, signals: StopSignals) -> RunResult:
    home, placement, options = Home(folder), context.plan.placement, context.options
    clear_leftovers(folder, reporter)
    records = Records(folder, start.iteration, reporter.note, placement.pools if placement else (),
                      evaluated=start.iteration < options.iterations or start.here is not None)
    writer = Writer(folder, options.keep, on_failure=partial(alarm, reporter), before=records.flush)
    loop = Loop(context, records, writer, reporter, partial(state.snapshot, context), partial(look, home, context, records, reporter))
    inputs = context.inputs or Dependencies(identity.Identity(), {})
    reader = DigestReader(inputs.identity, inputs.paths, partial(identify, context, inputs, records), reporter.note)
    evaluation = context.evaluation
    reporter.start(RunInfo(folder, context.plan.graph.name, options.iterations, context.settings,
                           evaluation.held_out if evaluation else 0, start.iteration, home.shown))
    context.watchdog.watch(folder)
    context.executor.board = context.watchdog.board
    ended, error = "failed", ""
    try:
        with context.watchdog.marking():
            describe(context, records)
            reader.start()
            context.heard_by(records.rewards.hear)
            if start is BEGUN and proving.wanted(context):
                prove(context, records, reporter)
            with context.computing():  # anew, since a proof that took too long has left another thread in the lane of models
                result = loop.run(start)
            _saved(writer, home)
            home.look()
            final.write_models(context, folder)
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
        loop.rescue()
        then = [write_traceback(raised, records, home), _how_to_go_on(writer, home, start, loop)]
        failure = _failure(raised, context.engine.iteration, "\n".join(filter(None, then)))
        error = str(failure)
        if failure is raised:
            raise
        raise failure from raised
    except BaseException as raised:  # such as SystemExit of a backend's
        loop.rescue()
        failure = _failure(RemoteError(ending(raised)), context.engine.iteration, _how_to_go_on(writer, home, start, loop))
        error = str(failure)
        raise failure from raised
    finally:
        signals.over = True
        try:
            reader.close()
            writer.close()
            _close(context, records, loop, home)
        finally:  # a ctrl-C may come here too, and the terminal must be left in order
            reporter.close(ended, error)  # type: ignore[arg-type]


def _close(context: RunContext, records: Records, loop: Loop, home: Home) -> None:
    """Write down what bounded the run, and end what belongs to it."""
    if loop.totals.iterations or not (home.path / "bounds.json").exists():  # else an earlier process knew more
        records.bounds(bounds_text(loop.totals), loop.totals.as_json())
    records.close()
    home.close()
    context.stop()
    records.rewards.close()  # the last of it is heard as their processes end


def prove(context: RunContext, records: Records, reporter: Reporter) -> None:
    """Have the run prove itself, and say in a line what came of it; what is falsified is a warning. All is kept in the folder. Raises
    PlanError where the run must not begin, and StageError where a stage raised in the rehearsal."""
    began = time.monotonic()
    with context.computing():
        claims = proving.quick(context)
    seconds = time.monotonic() - began
    records.whole(PROOF, "".join(f"{claim}\n" for claim in claims).encode())
    records.whole(PROOF_JSON, encoded(claims))
    refused = proving.refusal(claims, context.options.prove)
    for claim in claims:
        if claim.verdict == "falsified" and refused is None:
            alarm(reporter, f"warning: {claim}")
    reporter.note(f"proof before iteration 1: {summary(claims)}, in {seconds:.2f} s ({PROOF}; `rlflow prove` tries more)")
    if refused is not None:
        raise refused


def _failure(raised: Exception, iteration: int, then: str) -> Exception:
    """The error that a run ends with. An error of workers between stages, as in an evaluation or a save, is one of the run itself."""
    failure = StageError("", iteration, 0, str(raised), lines=noted_lines(raised)) if isinstance(raised, RemoteError) else raised
    if isinstance(failure, StageError):
        failure.then = then
    return failure


def write_traceback(raised: Exception, records: Records, home: Home) -> str:
    """Write the whole traceback of an exception that came from code, the user's or ours, into the run's folder; where it is, in words."""
    if isinstance(raised, FlowError | PlanError) or isinstance(raised, StageError) and raised.__cause__ is None:
        return ""  # its own words say all
    records.whole(TRACEBACK, printable(masked(whole(raised))).encode())
    return f"the whole traceback: {Path(home.shown) / TRACEBACK}"


def _how_to_go_on(writer: Writer, home: Home, start: RunStart, loop: Loop) -> str:
    """A text that says how to go on with a run that failed, and what of it is lost; empty where nothing is saved and nothing lost."""
    writer.wait(600.0)
    if writer.saved is None and not start.iteration:
        return f"nothing is saved: {loop.lost}" if loop.lost else ""
    older = f"{loop.lost}; " if loop.lost else ""
    newest = f"saved as {writer.saved.name}; " if writer.saved is not None else ""
    return f"{older}{newest}go on with: rlflow resume {home.shown}"


def clear_leftovers(folder: Path, reporter: Reporter) -> None:
    """Remove what a process that was killed here left half written."""
    try:
        for where in (folder, folder / answer_file.FOLDER):
            durable.clear(where)
    except OSError as error:
        reporter.note(f"what an earlier process left half written stays: {error.strerror} ('{error.filename}')")


def look(home: Home, context: RunContext, records: Records, reporter: Reporter) -> None:
    """Between iterations. Raises Lost where the folder is gone; what says what the run is, is written again where somebody deleted it."""
    home.look()
    if not (home.path / directory.SETTINGS).exists():
        reporter.note(f"{directory.SETTINGS} is gone from {home.shown}, and maybe other files: what the run is gets written again")
        describe(context, records)


def describe(context: RunContext, records: Records) -> None:
    """Have the folder say what the run is now, where it says something else: a resumed run may have more iterations."""
    for name, data in texts(context).items():
        try:
            same = durable.read(records.folder / name) == data
        except OSError:
            same = False
        if not same:
            records.whole(name, data, anew=True)


def identify(context: RunContext, inputs: Dependencies, records: Records, known: identity.Identity) -> None:
    """Take the identity that has the digests of all weights."""
    context.inputs = replace(inputs, identity=known)
    records.whole(identity.FILE, known.encode())


def saved_elsewhere(loop: Loop, lost: Lost) -> PlanError:
    """Save a run whose folder is gone: where that is now, or in a new folder in its place. Without it what was learnt would be lost."""
    context = loop.context
    try:
        folder = lost.moved or _anew(context, lost.folder)
        with Writer(folder, context.options.keep) as writer:
            loop.writer = writer
            loop.save(loop.done, context.prompts.state())
        where = f"it is saved as {writer.saved}" if writer.saved else f"it could not be saved there: {writer.failures[-1]}"
        remedy = f"rlflow resume {folder}" if writer.saved else "start the run again"
        name, run = context.plan.graph.name, context.options
        status.write(folder, replace(status.begun(name, run.iterations), state="failed", iteration=loop.done, error=str(lost)))
    except (OSError, PlanError) as error:
        where, remedy = f"it could not be saved anew: {error}", "start the run again"
    return PlanError.of("run-folder-lost", str(lost), found=where, expected="a folder that stays until the run ends", remedy=remedy)


def _anew(context: RunContext, folder: Path) -> Path:
    """A folder of the old name, or of a free one where something else has that. Raises PlanError."""
    flow, files = context.plan.graph.name, texts(context)
    try:
        return directory.create(folder.parent, folder.name, flow, files)
    except PlanError:
        return directory.create(folder.parent, None, flow, files)


def _saved(writer: Writer, home: Home, start: RunStart = BEGUN) -> str:
    """Wait until what was submitted is on the disk; how to go on from it, in words."""
    writer.wait(600.0)
    go_on = f"go on with: rlflow resume {home.shown}"
    if writer.saved is not None:
        return f"saved as {writer.saved.name}; {go_on}"
    return f"nothing new was saved; {go_on}" if start is not BEGUN else "no checkpoint was written by this process"
