"""Faults on the disk: kills at each change of the run folder, changed inputs, damaged logs, full disks.

Each function yields the outcomes of a class of faults, for the table of ``chaos.py``.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import faults as calls  # of tests/checkpoints, as are the others of tests/runs
import run_faults as faults
import test_code_in_models as code_in_models
import test_home as homes
import test_inputs as inputs
import test_killed as kills

from rlflow.errors import PlanError
from rlflow.monitoring import status
from rlflow.monitoring.outputs import make_reporter
from rlflow.runs import resume

AT_ONCE = min(os.cpu_count() or 1, 4)
TEXTS = (
    "identity.json",
    "settings.json",
    "graph.txt",
    "graph.json",
    "graph.msgpack",
    "status.json",
    "notes.txt",
    "metrics.jsonl",
    "samples.jsonl",
    "timeline.json",
    "answers.jsonl",
    "bounds.txt",
    "bounds.json",
)
# nodes of grpo with default settings
NULL_NODES = ("actor.generate", "reward", "actor.logprobs", "compare", "actor.update")
REFUSED = 2  # exit status of a child in which resume was refused with a PlanError


class Outcome(NamedTuple):
    """The outcome of one fault."""

    injected: bool = True
    detected: bool = False
    survived: bool = False
    wrong: bool = False


class Place(Protocol):
    """The settings for one class of faults: a folder, keyword arguments of a small run, and a selection of
    faults.
    """

    folder: Path

    @property
    def task(self) -> dict[str, Any]: ...

    def of(self, items: Iterable[Any], few: int = 3) -> list[Any]: ...


def all_of(actions: Iterable[Callable[[], object]]) -> list[int]:
    """Run actions in child processes, AT_ONCE at a time, and return their exit statuses."""
    waiting, codes = list(actions), []
    while waiting:
        pids = [faults.forked(action) for action in waiting[:AT_ONCE]]
        codes += [faults.status(pid) for pid in pids]
        waiting = waiting[AT_ONCE:]
    return codes


def resume_run(folder: Path, **changes: Any) -> None:
    """Resume a run in this child process. If the resume is refused, exit with REFUSED."""
    try:
        resume.resume(folder, changes, make_reporter(quiet=True))
    except PlanError:
        os._exit(REFUSED)


def small(place: Place, out: Path, **changes: Any) -> Any:
    """Run with a small real model. The run's folder is ``out/cut``."""
    keywords = {**place.task, "iterations": 2, "held_out": 4, "out": str(out), **changes}
    return faults.run("grpo", keywords, "cut", prompts=4)


def null(place: Place, out: Path) -> Any:
    """Run on the null backend."""
    return kills.null_run(out)


# -- a run's folder
# ------------------------------------------------------------------------------------------------------------


def killed_writing(begin: Callable[[Place, Path], Any], every: int) -> Callable[[Place], Iterator[Outcome]]:
    """Return a fault class that kills runs before or during a change to their folder, and resumes them.

    ``begin``: starts a run. ``every``: use only every ``every``-th of these points. A run without a name or a
    checkpoint cannot be resumed yet.
    """

    def outcomes(place: Place) -> Iterator[Outcome]:
        seen: list[str] = []
        straight, counted = place.folder / "straight", place.folder / "counted"
        faults.must(faults.in_child(lambda: begin(place, straight)), 0)
        with calls.watching(*calls.below(counted, lambda name, args: seen.append(name))):
            begin(place, counted)
        wanted = faults.content(straight / "cut")
        points = place.of(range(0, 2 * len(seen), every), 12)
        outs = [place.folder / f"at-{point}" for point in points]
        for out in outs:
            out.mkdir()
        codes = all_of(
            partial(dying, begin, place, out, point) for out, point in zip(outs, points, strict=True)
        )
        ended = all_of(partial(resume_run, out / "cut") for out in outs)
        for out, code, end in zip(outs, codes, ended, strict=True):
            yield killed(out / "cut", code, end, wanted)
            shutil.rmtree(out)

    return outcomes


def dying(begin: Callable[[Place, Path], Any], place: Place, out: Path, point: int) -> None:
    """Start a run, and kill this process at the ``point``-th change to files below ``out``."""
    with calls.watching(*calls.below(out, calls.dying_at(point))):
        begin(place, out)


def killed(folder: Path, code: int, end: int, wanted: faults.Content) -> Outcome:
    """Return the outcome for a run that was killed and resumed.

    ``code``: exit status of the killed run. ``end``: exit status of the resume. ``wanted``: results without
    the fault.
    """
    died = code == -signal.SIGKILL
    if not list(folder.glob("checkpoints/step-*")):
        # a folder without settings is not a run and would block the next run of this name
        there = folder.exists() and not (folder / "settings.json").exists()
        return Outcome(died, True, not there and end == REFUSED)
    left = [
        path for path in (*folder.iterdir(), *(folder / "checkpoints").iterdir()) if path.name.startswith(".")
    ]
    found = status.read(folder)
    whole = found is not None and found.state == "done" and (folder / "final" / "actor").is_dir() and not left
    return Outcome(died, True, whole, any(faults.differences(faults.content(folder), wanted)))


def lost(place: Place) -> Iterator[Outcome]:
    """Move or delete the run's folder when a node of the third iteration starts.

    The run must end soon, save its state, and print where the state is.
    """
    wanted = homes.null_run(place.folder / "wanted").folder
    for number, (node, kind) in enumerate(
        (n, k) for n in place.of(NULL_NODES, 2) for k in ("moved", "deleted")
    ):
        out = place.folder / str(number)
        folder, there = out / "runs" / "run", out / "there"
        out.mkdir()
        act = partial(folder.rename, there) if kind == "moved" else partial(shutil.rmtree, folder)
        words = [
            "run",
            "grpo",
            "--backend",
            "null",
            "--prompts",
            4,
            "--iterations",
            homes.ITERATIONS,
            "--save-every",
            0,
            "--out",
            out / "runs",
            "--name",
            "run",
            "--quiet",
        ]
        output = faults.command(words, out / "said", partial(faults.at, node, 2, act))
        where = there if kind == "moved" else folder
        ended = faults.in_child(partial(resume_run, where)) == 0
        same = ended and homes.content_without_metrics(where) == homes.content_without_metrics(wanted)
        yield Outcome(
            True, output.code == 2 and f"rlflow resume {where}" in output.err, ended, ended and not same
        )


def model_lost(place: Place) -> Iterator[Outcome]:
    """Delete the model folder when a node of the first iteration starts."""
    straight = place.folder / "straight"
    faults.must(faults.in_child(lambda: small(place, straight)), 0)
    wanted = faults.content(straight / "cut")
    for node in place.of(faults.nodes("grpo"), 2):
        out, model = place.folder / f"at-{node}", place.folder / f"model-{node}"
        shutil.copytree(faults.MODEL, model)

        def losing(node: str = node, out: Path = out, model: Path = model) -> None:
            faults.at(node, 0, lambda: shutil.rmtree(model))
            small(place, out, model=str(model))

        ended = faults.in_child(losing) == 0
        right = ended and same_files(out / "cut/final/actor", straight / "cut/final/actor")
        yield Outcome(
            not model.exists(),
            True,
            right,
            ended and any(faults.differences(faults.content(out / "cut"), wanted)),
        )


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders contain the same files with the same bytes."""
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (one, other)]
    return files[0] == files[1]


def full_at(place: Place) -> Iterator[Outcome]:
    """Give one text file of a run no disk space, from the start or after a resume.

    Other files can be written. A new run may refuse to start if the files that describe it cannot be written.
    """
    wanted = homes.null_run(place.folder / "wanted").folder
    for name in place.of(TEXTS, 4):
        for started in (False, True):
            out = place.folder / f"{name}-{started}"
            if started:
                faults.must(faults.in_child(lambda out=out: homes.null_run(out, iterations=2)), 0)
            act = (
                partial(resume_run, out / "run", iterations=homes.ITERATIONS)
                if started
                else partial(homes.null_run, out)
            )
            output = faults.quietly(partial(without_room, out, name, act), place.folder / "said")
            if (out / "refused").exists():  # an unchanged file is not written again, so no write can fail
                yield outcome_without_room(out / "run", output, wanted)


def outcome_without_room(folder: Path, output: faults.Said, wanted: Path) -> Outcome:
    """Return the outcome of a run that had no disk space for a file.

    ``output``: what the run printed. ``wanted``: the folder of the run without the fault.
    """
    if not folder.exists():
        return Outcome(True, "No space left" in output.err, output.code == 1 and "PlanError" in output.err)
    ended = output.code == 0
    lines = homes.numbers(folder)
    right = (
        ended
        and homes.content_without_metrics(folder) == homes.content_without_metrics(wanted)
        and len(set(lines)) == len(lines)
    )
    notes = (folder / "notes.txt").read_text() if (folder / "notes.txt").exists() else ""
    return Outcome(
        True,
        "No space left" in output.err + notes,
        ended and (folder / "final/actor").is_dir(),
        ended and not right,
    )


def without_room(out: Path, name: str, action: Callable[[], object]) -> None:
    """Run an action while writes to some files below ``out`` fail: those whose name contains ``name``.

    Temporary files with this name are included.
    """
    files: set[int] = set()

    def before(call: str, args: tuple[Any, ...]) -> None:
        if call == "write" and args[0] in files:
            (out / "refused").touch()
            raise OSError(errno.ENOSPC, "No space left on device")

    def after(call: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if call == "open":
            path = Path(os.fsdecode(args[0]))
            (files.add if name in path.name and path.is_relative_to(out) else files.discard)(result)

    with calls.watching(before, after):
        action()


def damaged(place: Place) -> Iterator[Outcome]:
    """Damage logs, graph files or settings before a run is resumed.

    If settings are incomplete, the run must refuse.
    """
    shorter = homes.null_run(place.folder / "half", iterations=2).folder
    wanted = homes.null_run(place.folder / "wanted").folder
    names = (
        "metrics.jsonl",
        "samples.jsonl",
        "fates.jsonl",
        "notes.txt",
        "graph.msgpack",
        "settings.json",
        "status.json",
    )
    kinds = [(name, kind) for name in names for kind in homes.DAMAGE]
    for number, (name, kind) in enumerate(place.of(kinds, 9)):
        folder = place.folder / str(number) / "run"
        shutil.copytree(shorter, folder)
        homes.DAMAGE[kind][0](folder / name) if (folder / name).exists() else None
        code = faults.in_child(partial(resume_run, folder, iterations=homes.ITERATIONS))
        ended = code == 0
        lines = homes.numbers(folder) if ended else []
        right = (
            ended
            and homes.content_without_metrics(folder) == homes.content_without_metrics(wanted)
            and len(set(lines)) == len(lines)
        )
        yield Outcome(True, True, ended or (code == REFUSED and name == "settings.json"), ended and not right)


# -- inputs of a run
# -------------------------------------------------------------------------------------------------------


def changed(place: Place) -> Iterator[Outcome]:
    """Change rewards, model folders, tokenizers, data or modules before a run is resumed.

    The resume must refuse and name the change. A fork of the run must accept the change.
    """
    ground = place.folder / "ground"
    ground.mkdir()
    faults.must(faults.in_child(lambda: inputs.made(ground)), 0)
    for number, kind in enumerate(place.of(inputs.CHANGES, 5)):
        where = inputs.copied(ground, place.folder / str(number))
        file, change, line = inputs.CHANGES[kind]
        change(where / file)
        folder = where / "runs/grpo-1"
        output = faults.command(
            ["resume", folder, "--iterations", 2, "--trust", "--quiet"], place.folder / "said"
        )
        forked = faults.command(
            ["resume", folder, "--fork", "--iterations", 2, "--trust", "--quiet"], place.folder / "forked"
        )
        # a fork continues with the data of the checkpoint, so changed held-out data is refused
        taken = forked.code == (2 if kind == "held-out data" else 0)
        yield Outcome(True, output.code == 2 and line in output.err, taken, output.code == 0)


def code_of_models(place: Place) -> Iterator[Outcome]:
    """Use model folders that contain code.

    If transformers asks whether to run it, standard input says yes.
    """
    task = place.task
    kinds = [(backend, unknown) for backend in ("null", "local") for unknown in ({}, code_in_models.UNKNOWN)]
    for number, (backend, unknown) in enumerate(place.of(kinds, 2)):
        where = place.folder / str(number)
        where.mkdir()
        code_in_models.with_code(where / "model", where / "ran", unknown)
        keywords = {
            "model": str(where / "model"),
            "data": task["data"],
            "out": str(where / "runs"),
            "iterations": 1,
            "held_out": 0,
        }
        run = partial(faults.run, "grpo", keywords, "told", prompts=4, backend=backend)
        code = code_in_models.answered(b"y\n" * 20, run)
        yield Outcome(True, True, code == 0 or bool(unknown), (where / "ran").exists())


CLASSES: dict[str, Callable[[Place], Iterator[Outcome]]] = {
    "kill -9 at each change of the folder": killed_writing(null, 1),
    "kill -9 at each change of the folder, with models": killed_writing(small, 9),
    "run folder moved or deleted": lost,
    "model folder deleted": model_lost,
    "disk full for a text file": full_at,
    "logs, row accounting, graph, settings damaged": damaged,
    "inputs changed before resume": changed,
    "code in model folders": code_of_models,
}
