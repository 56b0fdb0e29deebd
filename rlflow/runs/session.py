"""The life of a run: its folder and lock, its writers and reporters, and how it ends."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlflow.checkpoints import durable
from rlflow.checkpoints.lock import Lock
from rlflow.checkpoints.writer import Writer
from rlflow.errors import Stopped
from rlflow.monitoring import terminal
from rlflow.monitoring.reporter import Reporter, RunInfo, alarm
from rlflow.processes.watchdog.signals import StopSignals
from rlflow.runs import directory, final, identity, state
from rlflow.runs.context import RunContext, RunResult, RunStart
from rlflow.runs.depends import Dependencies
from rlflow.runs.directory import Lost, RunFolder
from rlflow.runs.early_end import BEGUN, EarlyEnd, save_lost, texts
from rlflow.runs.final import bounds_text
from rlflow.runs.identity import DigestReader
from rlflow.runs.loop import Loop
from rlflow.runs.proof import proving
from rlflow.runs.proof.claims import encoded, summary
from rlflow.runs.records import Records

# the claims that the run checked about itself, for people and for `rlflow explain`
PROOF, PROOF_JSON = "proof.txt", "proof.json"


class Interrupted(KeyboardInterrupt):
    """Raised if the run was stopped on request.

    The message names the saved checkpoint and the command that resumes the run.
    """


def start_run(context: RunContext, reporter: Reporter) -> RunResult:
    """Start a new run in its own folder and return its result.

    Everything that was started for the run is stopped in the end, even after an error.
    """
    with Lock(new_folder(context)) as lock:
        return continue_run(context, lock.folder, reporter, BEGUN)


def new_folder(context: RunContext) -> Path:
    """Create the run's folder with the files that describe the run, and return its path.

    If this fails, the context is closed and PlanError is raised.
    """
    try:
        return directory.create(
            Path(context.options.out), context.options.name, context.plan.graph.name, texts(context)
        )
    except BaseException:
        context.close()
        raise


def continue_run(context: RunContext, folder: Path, reporter: Reporter, start: RunStart) -> RunResult:
    """Continue a run from ``start`` and return its result. The caller must hold the lock of ``folder``.

    If all iterations are done, finish what's left to do. Raises Interrupted, StageError and PlanError.
    """

    def ask() -> None:
        if not signals.over:
            context.executor.stopping = True
            reporter.note(
                "stopping: the run finishes its current work and saves (press ctrl-C again to stop now)"
            )

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


def _continue(
    context: RunContext, folder: Path, reporter: Reporter, start: RunStart, signals: StopSignals
) -> RunResult:
    run_folder = RunFolder(folder)
    clear_leftovers(folder, reporter)
    records = _records(context, folder, reporter, start)
    writer = Writer(folder, context.options.keep, on_failure=partial(alarm, reporter), before=records.flush)
    loop = Loop(
        context,
        records,
        writer,
        reporter,
        partial(state.snapshot, context),
        partial(look, run_folder, context, records, reporter),
    )
    reader = _digest_reader(context, records, reporter)
    early_end = EarlyEnd(run_folder, start, records, writer, loop, reporter.note)
    reporter.start(_info(context, folder, run_folder.shown, start))
    context.watchdog.watch(folder)
    context.executor.heartbeat_page = context.watchdog.heartbeat_page
    ended, error = "failed", ""
    try:
        with context.watchdog.marking():
            result = _run(context, records, reporter, start, reader, loop)
            writer.wait(600.0)
            run_folder.look()
            final.write_models(context, folder)
            error = early_end.unsaved()[0] if writer.missed else ""
        ended = "done"
        return replace(result, shown=run_folder.shown, unsaved=error)
    except Stopped:
        ended = "interrupted"
        raise Interrupted(early_end.stopped()) from None
    except KeyboardInterrupt:
        ended = "interrupted"
        raise Interrupted(early_end.stopped(at_once=True)) from None
    except Lost as lost:
        elsewhere = save_lost(loop, lost)
        error = str(elsewhere)
        raise elsewhere from None
    except BaseException as raised:
        failure = early_end.failure(raised)
        error = str(failure)
        if failure is raised:
            raise
        raise failure from raised
    finally:
        signals.over = True
        try:
            reader.close()
            writer.close()
            _close(context, records, loop, run_folder)
        finally:  # Ctrl-C may interrupt this too, and the terminal must be restored
            reporter.close(ended, error)  # type: ignore[arg-type]


def _records(context: RunContext, folder: Path, reporter: Reporter, start: RunStart) -> Records:
    placement = context.plan.placement
    return Records(
        folder,
        start.iteration,
        reporter.note,
        placement.pools if placement else (),
        evaluated=start.iteration < context.options.iterations or start.here is not None,
    )


def _digest_reader(context: RunContext, records: Records, reporter: Reporter) -> DigestReader:
    inputs = context.inputs or Dependencies(identity.Identity(), {})
    return DigestReader(
        inputs.identity, inputs.paths, partial(identify, context, inputs, records), reporter.note
    )


def _info(context: RunContext, folder: Path, shown: str, start: RunStart) -> RunInfo:
    return RunInfo(
        folder,
        context.plan.graph.name,
        context.options.iterations,
        context.settings,
        context.evaluation.held_out if context.evaluation else 0,
        start.iteration,
        shown,
    )


def _run(
    context: RunContext,
    records: Records,
    reporter: Reporter,
    start: RunStart,
    reader: DigestReader,
    loop: Loop,
) -> RunResult:
    """Write the files that describe the run, prove it if it is new, and run all iterations."""
    describe(context, records)
    reader.start()
    context.on_output(records.rewards.on_output)
    if start is BEGUN and proving.wanted(context):
        prove(context, records, reporter)
    # entered again, because a proof that took too long leaves a different thread in the model queue
    with context.computing():
        return loop.run(start)


def _close(context: RunContext, records: Records, loop: Loop, run_folder: RunFolder) -> None:
    """Write the run's time bounds, close its records and folder, and stop everything it started."""
    # without iterations, keep the bounds that an earlier process wrote
    if loop.totals.iterations or not (run_folder.path / "bounds.json").exists():
        records.bounds(bounds_text(loop.totals), loop.totals.as_json())
    records.close()
    run_folder.close()
    context.stop()
    records.rewards.close()  # last, because reward processes still print while they end


def prove(context: RunContext, records: Records, reporter: Reporter) -> None:
    """Check the quick claims about the run, write them to its folder, and print a summary.

    Falsified claims are reported as warnings. Raises PlanError if the run may not start, and StageError if a
    stage fails in the dry run.
    """
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
    reporter.note(
        f"proof before iteration 1: {summary(claims)}, in {seconds:.2f} s (see {PROOF} in the run's folder; "
        "`rlflow prove` takes more time and checks more)"
    )
    if refused is not None:
        raise refused


def clear_leftovers(folder: Path, reporter: Reporter) -> None:
    """Remove incomplete files that a killed process left in the run's folder."""
    try:
        for where in (folder, folder / final.ANSWERS):
            durable.clear(where)
    except OSError as error:
        reporter.note(
            f"a half-written file of an earlier process could not be removed: {error.strerror} "
            f"('{error.filename}')"
        )


def look(run_folder: RunFolder, context: RunContext, records: Records, reporter: Reporter) -> None:
    """Check on the run's folder between iterations.

    Raises Lost if the folder is gone. If the files that describe the run were deleted, they are written
    again.
    """
    run_folder.look()
    if not (run_folder.path / directory.SETTINGS).exists():
        reporter.note(
            f"{directory.SETTINGS} was deleted from {run_folder.shown}, and maybe other files: the run writes "
            "its description again"
        )
        describe(context, records)


def describe(context: RunContext, records: Records) -> None:
    """Write the files that describe the run if they have changed, for example because of more iterations."""
    for name, data in texts(context).items():
        try:
            same = durable.read(records.folder / name) == data
        except OSError:
            same = False
        if not same:
            records.whole(name, data, anew=True)


def identify(context: RunContext, inputs: Dependencies, records: Records, known: identity.Identity) -> None:
    """Store the run's identity once all digests of weights are known."""
    context.inputs = replace(inputs, identity=known)
    records.whole(identity.FILE, known.encode())
