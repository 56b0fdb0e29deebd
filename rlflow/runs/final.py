"""A run's results: its trained models as Hugging Face folders, the answers from evaluations, and a summary.

Folders and files appear only once they are complete.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from safetensors import SafetensorError

from rlflow.checkpoints import durable
from rlflow.checkpoints.model_files import CONFIG
from rlflow.compiler.passes.queues import queue_words
from rlflow.compiler.residency_schedule import computing
from rlflow.errors import PlanError, printable
from rlflow.execution.role_model import RoleModel
from rlflow.monitoring import status
from rlflow.monitoring.explained import pointer
from rlflow.monitoring.metric_names import accuracies, change, share
from rlflow.monitoring.recorded import recorded
from rlflow.monitoring.tables import curves
from rlflow.runs.bounds import PATH, RunTotals, TimeBounds
from rlflow.runs.context import RunContext, RunResult
from rlflow.runs.evaluate import KeepAnswers, shown
from rlflow.runs.outcomes import outcomes_text, run_account
from rlflow.runs.state import trained

FOLDER = "final"


def finished(folder: Path, iterations: int, roles: Mapping[str, RoleModel]) -> bool:
    """Return whether a run is recorded as finished after ``iterations`` iterations and all its models exist."""
    try:
        record = status.read(folder)
    except ValueError:
        return False
    there = all((folder / FOLDER / role).is_dir() for role in roles)
    return record is not None and record.state == "done" and record.iterations == iterations and there


def write_models(context: RunContext, folder: Path) -> None:
    """Write a folder ``final/ROLE`` for each trained role.

    All folders are written under temporary names, flushed to disk and then renamed, so they are never
    incomplete. Raises PlanError if they can't be written.
    """
    roles = trained(context)
    if not roles:
        return
    aside = durable.aside(folder / FOLDER)
    try:
        os.mkdir(aside)
        try:
            for role, model in roles.items():
                _write(context, role, model, aside / role)
            durable.take_place(aside, folder / FOLDER)
        finally:
            if os.path.lexists(aside):
                durable.delete(aside)
    except (OSError, SafetensorError) as error:
        raise PlanError.of(
            "final-model",
            "the trained models cannot be written",
            found=str(getattr(error, "strerror", None) or error),
            expected=f"free space in {folder}",
            remedy="free space",
        ) from error


def _write(context: RunContext, role: str, model: RoleModel, folder: Path) -> None:
    """Write one role's model: its trainer's files and the tokenizer that the run started with.

    Raises OSError.
    """
    assert model.trainer is not None
    context.engine.offloads.settle(computing(role))
    model.trainer.save(folder)
    if not folder.is_dir():
        raise OSError(
            None,
            f"the process that trains '{role}' does not share this disk: it wrote nothing to this folder",
        )
    for name, data in context.files.get(role, {}).items() if (folder / CONFIG[0]).is_file() else ():
        if name != CONFIG[0]:  # the trainer wrote this file
            path = folder / name
            path.unlink(missing_ok=True)
            durable.write(path, [data])


ANSWERS = "evaluations"  # folder in a run's folder, with a file for each evaluation


def name_of(iteration: int) -> str:
    """Return the name of the file for the answers after ``iteration`` iterations."""
    return f"{ANSWERS}/after-{iteration:06}.jsonl"


@contextlib.contextmanager
def answer_file(path: Path, failed: Callable[[OSError], object]) -> Iterator[KeepAnswers]:
    """Return a context for writing answers to the file ``path``. Its value is a function to call per prompt.

    Pass the function the record of a prompt's answers. The file appears once all answers are on disk, and not
    at all if there are none. Write errors aren't raised: ``failed`` is called once with the error.
    """
    file = _Lines(path)

    def attempt(action: Callable[[], object]) -> None:
        if file.error is None:
            try:
                action()
            except OSError as error:
                file.error = error
                failed(error)

    try:
        yield lambda answers: attempt(lambda: file.add(answers))
        attempt(file.finish)
    finally:
        file.discard()


class _Lines:
    """A file that is written under a temporary name and renamed when it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None  # the error that ended the writing
        self._aside = durable.aside(path)
        self._file: int | None = None

    def add(self, answers: Mapping[str, Any]) -> None:
        """Write a prompt's answers as a line of JSON. Raises OSError."""
        if self._file is None:
            durable.make_folder(self.path.parent)
            self._file = os.open(self._aside, durable.NEW, 0o666)
        durable.write_all(
            self._file, memoryview(f"{json.dumps(answers)}\n".encode(errors="backslashreplace"))
        )

    def finish(self) -> None:
        """Flush everything to disk and give the file its final name. Raises OSError."""
        if self._file is not None:
            os.fsync(self._file)
            durable.move(self._aside, self.path)

    def discard(self) -> None:
        """Close the file, and remove it if it isn't complete."""
        if self._file is not None:
            os.close(self._file)
            with contextlib.suppress(OSError):
                os.unlink(self._aside)


SHOWN = 0.01  # share of an iteration; smaller parts are not mentioned

WIDTHS = {"prompt": 40, "answer": 14, "before": 14, "after": 14}


def summary(result: RunResult) -> str:
    """Return a run's summary as text.

    It shows the accuracy before and after training, and for each node its time, its share and how much of it
    was on the critical path.
    """
    parts = []
    if result.before and result.after:
        parts += [_rendered(_learning(result)), _rendered(_answers(result))]
    if result.unmeasured:
        parts.append(result.unmeasured)
    parts += [_rendered(part) for part in curves(recorded(result.folder))]
    parts.append(bounds_text(result.totals))
    if fates := outcomes_text(run_account(result.folder)):
        parts.append(fates)
    if result.skipped:
        parts.append(
            f"{result.skipped} of {result.iterations} iterations were skipped: no rows were kept to train on"
        )
    if line := pointer(result.folder, result.shown):
        parts.append(line)
    many = "s" * (result.iterations != 1)
    parts.append(
        f"{result.iterations} iteration{many} in {result.seconds:.1f} s; run folder: {result.shown or result.folder}"
    )
    if result.unsaved:
        parts.append(f"warning: {result.unsaved}")
    return "\n".join(parts)


def _learning(result: RunResult) -> Table:
    assert result.before is not None
    assert result.after is not None
    table = Table("held-out accuracy", "before", "after", "change")
    first, last = accuracies(shown(result.before)), accuracies(shown(result.after))
    for name, after in last.items():
        before = first.get(name, math.nan)
        table.add_row(name, share(before), share(after), change(before, after))
    one, two = result.before.score, result.after.score
    if one is not None and two is not None:
        table.add_row("mean score", f"{one:.3f}", f"{two:.3f}", f"{two - one:+.3f}")
    return table


def _answers(result: RunResult) -> Table:
    table = Table("held-out prompt", "answer", "before", "after")
    for row in result.answers[:5]:
        table.add_row(*(escape(printable(_cut(row.get(name, ""), width))) for name, width in WIDTHS.items()))
    return table


def _cut(text: str, width: int) -> str:
    """Return the last ``width`` characters of a text on one line. Questions often start with the same words."""
    line = " ".join(text.split())
    return line if len(line) <= width else "…" + line[1 - width :]


def bounds_text(totals: RunTotals) -> str:
    """Return a table of a run's nodes, and lines that say what limited its speed."""
    bounds = totals.bounds
    if not bounds.iterations:
        return "no iteration was completed"
    by = bounds.by if bounds.by == PATH else f"the total work of {queue_words(bounds.by)}"
    alike = (
        f" (of {bounds.alike} iteration{'s' if bounds.alike > 1 else ''})"
        if bounds.alike < bounds.iterations
        else ""
    )
    shares = ", ".join(
        f"{queue_words(lane)} {share:.0%}"
        for lane, share in bounds.busy.items()
        if share >= SHOWN or "." not in lane
    )
    return "\n".join(
        [
            _rendered(_stages(totals)),
            (
                f"an iteration took {bounds.seconds:.3f} s; any schedule of its nodes takes at least "
                f"{bounds.bound:.3f} s: {by}"
            ),
            f"critical path{alike}: {_chain(bounds)}; {bounds.outside:.3f} s outside nodes",
            f"busy: {shares}",
        ]
    )


def _chain(bounds: TimeBounds) -> str:
    """Return the nodes on the critical path as text, with "…" for those that took almost no time."""
    words = [
        f"{node} {seconds:.3f} s" if seconds >= SHOWN * bounds.seconds else "…"
        for node, seconds in bounds.critical.items()
    ]
    return " → ".join(
        word for word, before in zip(words, ["", *words], strict=False) if (word, before) != ("…", "…")
    )


def _stages(totals: RunTotals) -> Table:
    table = Table("node", "calls", "seconds", "share", "on the critical path")
    for column in table.columns[1:]:
        column.justify = "right"
    total = totals.seconds or 1.0
    for node in totals:
        table.add_row(
            node.node,
            str(node.calls),
            f"{node.seconds:.2f}",
            f"{node.part / total:.0%}",
            f"{node.critical / total:.0%}",
        )
    return table


def _rendered(table: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=100, no_color=True).print(table)
    return out.getvalue().rstrip()
