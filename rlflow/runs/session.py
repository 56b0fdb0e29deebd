"""The lifetime of a run: its folder and lock, its writers and reporters, and how it ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlflow.checkpoints import durable
from rlflow.checkpoints.lock import Lock
from rlflow.checkpoints.writer import Writer
from rlflow.errors import FlowError, PlanError, RemoteError, StageError, Stopped, printable
from rlflow.execution.apply import ending
from rlflow.monitoring import terminal
from rlflow.monitoring.reporter import Reporter, RunInfo, alarm
from rlflow.monitoring.secrets import masked
from rlflow.processes.user_frames import whole
from rlflow.processes.watchdog.signals import StopSignals
from rlflow.runs import directory, final, identity, proving, state
from rlflow.runs.context import RunContext, RunResult, RunStart
from rlflow.runs.depends import Dependencies
from rlflow.runs.directory import Lost, RunFolder, shown
from rlflow.runs.elsewhere import save_elsewhere, save_lost, texts
from rlflow.runs.identity import DigestReader
from rlflow.runs.loop import Loop
from rlflow.runs.proof.claims import encoded, summary
from rlflow.runs.records import Records
from rlflow.runs.report import bounds_text

BEGUN = RunStart()
# the claims that the run checked about itself, for people and for `rlflow explain`
PROOF, PROOF_JSON = "proof.txt", "proof.json"
NO_CHECKPOINT = "no checkpoint was written by this process"
TRACEBACK = "traceback.txt"  # file with the traceback of the exception that ended the run


class Interrupted(KeyboardInterrupt):
    """The run was stopped on request.

    The message names the saved checkpoint and the command that resumes the run.
    """


def start_run(context: RunContext, reporter: Reporter) -> RunResult:
    """Start a new run in its own folder and return its result.

    Everything that the run starts is stopped at the end, also after an error.
    """
    with Lock(new_folder(context)) as lock:
        return continue_run(context, lock.folder, reporter, BEGUN)


def new_folder(context: RunContext) -> Path:
    """Create the run's folder with the files that describe the run, and return its path.

    If the folder cannot be created, the context is closed and PlanError is raised.
    """
    try:
        return directory.create(
            Path(context.options.out), context.options.name, context.plan.graph.name, texts(context)
        )
    except BaseException:
        context.close()
        raise


def continue_run(context: RunContext, folder: Path, reporter: Reporter, start: RunStart) -> RunResult:
    """Continue a run from ``start`` in a folder whose lock this process holds. Return its result.

    If all iterations are done, the remaining work is finished. Raises Interrupted, StageError and PlanError.
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
    run_folder, placement, options = RunFolder(folder), context.plan.placement, context.options
    clear_leftovers(folder, reporter)
    records = Records(
        folder,
        start.iteration,
        reporter.note,
        placement.pools if placement else (),
        evaluated=start.iteration < options.iterations or start.here is not None,
    )
    writer = Writer(folder, options.keep, on_failure=partial(alarm, reporter), before=records.flush)
    loop = Loop(
        context,
        records,
        writer,
        reporter,
        partial(state.snapshot, context),
        partial(look, run_folder, context, records, reporter),
    )
    inputs = context.inputs or Dependencies(identity.Identity(), {})
    reader = DigestReader(
        inputs.identity, inputs.paths, partial(identify, context, inputs, records), reporter.note
    )
    evaluation = context.evaluation
    reporter.start(
        RunInfo(
            folder,
            context.plan.graph.name,
            options.iterations,
            context.settings,
            evaluation.held_out if evaluation else 0,
            start.iteration,
            run_folder.shown,
        )
    )
    context.watchdog.watch(folder)
    context.executor.heartbeat_page = context.watchdog.heartbeat_page
    ended, error = "failed", ""
    try:
        with context.watchdog.marking():
            describe(context, records)
            reader.start()
            context.on_output(records.rewards.on_output)
            if start is BEGUN and proving.wanted(context):
                prove(context, records, reporter)
            # entered again, because a proof that took too long leaves a different thread in the model queue
            with context.computing():
                result = loop.run(start)
            writer.wait(600.0)
            run_folder.look()
            final.write_models(context, folder)
            error = _unsaved(writer, run_folder, loop)[0] if writer.missed else ""
        ended = "done"
        return replace(result, shown=run_folder.shown, unsaved=error)
    except Stopped:
        ended = "interrupted"
        raise Interrupted(
            f"stopped; {_how_to_go_on(writer, run_folder, start, loop) or NO_CHECKPOINT}"
        ) from None
    except KeyboardInterrupt:
        ended = "interrupted"
        raise Interrupted(
            f"stopped at once; {_how_to_go_on(writer, run_folder, start, loop, at_once=True) or NO_CHECKPOINT}"
        ) from None
    except Lost as lost:
        elsewhere = save_lost(loop, lost)
        error = str(elsewhere)
        raise elsewhere from None
    except Exception as raised:
        loop.rescue()
        then = [write_traceback(raised, records, run_folder), _how_to_go_on(writer, run_folder, start, loop)]
        failure = _failure(raised, context.engine.iteration, "\n".join(filter(None, then)), reporter.note)
        error = str(failure)
        if failure is raised:
            raise
        raise failure from raised
    except BaseException as raised:  # such as a SystemExit that a backend raises
        loop.rescue()
        failure = _failure(
            RemoteError(ending(raised)),
            context.engine.iteration,
            _how_to_go_on(writer, run_folder, start, loop),
            reporter.note,
        )
        error = str(failure)
        raise failure from raised
    finally:
        signals.over = True
        try:
            reader.close()
            writer.close()
            _close(context, records, loop, run_folder)
        finally:  # ctrl-C may interrupt this too, and the terminal must be restored
            reporter.close(ended, error)  # type: ignore[arg-type]


def _close(context: RunContext, records: Records, loop: Loop, run_folder: RunFolder) -> None:
    """Write the time bounds of the run, and close its records and its folder."""
    # without iterations, keep the bounds that an earlier process wrote
    if loop.totals.iterations or not (run_folder.path / "bounds.json").exists():
        records.bounds(bounds_text(loop.totals), loop.totals.as_json())
    records.close()
    run_folder.close()
    context.stop()
    records.rewards.close()  # last, because reward processes still print while they end


def prove(context: RunContext, records: Records, reporter: Reporter) -> None:
    """Check the quick claims about the run, write them to its folder, and print a summary.

    Each falsified claim is a warning. Raises PlanError if the run must not start, and StageError if a stage
    fails in the dry run.
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


def _failure(raised: Exception, iteration: int, then: str, note: Callable[[str], object]) -> Exception:
    """Return the error that ends the run, with the text ``then`` added.

    If the error cannot contain the text, ``note`` prints it. An error of a worker outside any stage, for
    example in an evaluation or a save, is turned into an error of the run.
    """
    failure = (
        StageError("", iteration, 0, str(raised), lines=raised.lines)
        if isinstance(raised, RemoteError)
        else raised
    )
    if isinstance(failure, StageError):
        failure.then = then
    elif isinstance(failure, PlanError) and then:
        *others, last = failure.problems
        return PlanError(*others, replace(last, remedy="; ".join(filter(None, (last.remedy, then)))))
    elif then:
        note(then)
    return failure


def write_traceback(raised: Exception, records: Records, run_folder: RunFolder) -> str:
    """Write the full traceback of an exception to the run's folder. Return a line with its path.

    If the error explains itself, nothing is written and the line is empty.
    """
    if isinstance(raised, FlowError | PlanError) or (
        isinstance(raised, StageError) and raised.__cause__ is None
    ):
        return ""  # its message is complete
    records.whole(TRACEBACK, printable(masked(whole(raised))).encode())
    return f"full traceback: {Path(run_folder.shown) / TRACEBACK}"


def _how_to_go_on(
    writer: Writer, run_folder: RunFolder, start: RunStart, loop: Loop, at_once: bool = False
) -> str:
    """Return a text for the end of a run that ended early.

    It has the command that resumes the run, and names the state that is lost. It is empty if nothing is saved
    and nothing is lost. ``at_once``: do not try to save anything more.
    """
    writer.wait(600.0)
    unsaved, place = (
        _unsaved(writer, run_folder, loop) if writer.missed and not at_once else (loop.lost, None)
    )
    parts = [unsaved] if unsaved else []
    if place is not None:
        parts.append(f"to continue: rlflow resume {shown(place)}")
    elif writer.saved is not None:
        parts.append(f"saved as {writer.saved.name}; to continue: rlflow resume {run_folder.shown}")
    elif start is not BEGUN:
        parts.append(f"nothing new was saved; to continue: rlflow resume {run_folder.shown}")
    elif unsaved:
        parts.append("no checkpoint is left: start the run again")
    return "; ".join(parts)


def _unsaved(writer: Writer, run_folder: RunFolder, loop: Loop) -> tuple[str, Path | None]:
    """Try to save the newest state in another folder.

    Returns a text that says why the run's folder could not store the state, and the new run folder, or None.
    """
    place = save_elsewhere(loop, run_folder.path, writer.missed)
    where = (
        f"it is saved in {shown(place)}"
        if place is not None
        else "no other folder could store it, so it is lost"
    )
    return f"the newest state could not be saved: {writer.missed}; {where}", place


def clear_leftovers(folder: Path, reporter: Reporter) -> None:
    """Remove incomplete files that a killed process left in this folder."""
    try:
        for where in (folder, folder / final.ANSWERS):
            durable.clear(where)
    except OSError as error:
        reporter.note(
            f"a half-written file of an earlier process could not be removed: {error.strerror} "
            f"('{error.filename}')"
        )


def look(run_folder: RunFolder, context: RunContext, records: Records, reporter: Reporter) -> None:
    """Check the run's folder between iterations.

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
    """Write the files that describe the run if their content has changed.

    For example, a resumed run may have more iterations.
    """
    for name, data in texts(context).items():
        try:
            same = durable.read(records.folder / name) == data
        except OSError:
            same = False
        if not same:
            records.whole(name, data, anew=True)


def identify(context: RunContext, inputs: Dependencies, records: Records, known: identity.Identity) -> None:
    """Store the run's identity, now that all digests of weights are known."""
    context.inputs = replace(inputs, identity=known)
    records.whole(identity.FILE, known.encode())
