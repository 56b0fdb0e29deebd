"""A run's directory: settings, graph, metrics, samples and timeline as text files that any tool reads."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from rlflow.errors import Place, PlanError
from rlflow.execution.executor import Outcome
from rlflow.graph import draw, wire
from rlflow.graph.model import Graph, Value
from rlflow.residency import computing
from rlflow.runs.timeline import Timeline
from rlflow.watch.secrets import masked, redacted

if TYPE_CHECKING:
    from rlflow.runs.loop import Prepared

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


GRAPH = "graph.msgpack"


def create(out: Path, name: str | None, flow: str) -> Path:
    """A new folder in ``out``: ``name``, or the flow's name and the next free number. Raises PlanError for a name that is taken or
    would lie elsewhere."""
    check_free(out, name)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if name is not None:
            (out / name).mkdir()
            return out / name
        return _numbered(out, flow)
    except FileExistsError:
        raise _exists(out / (name or "")) from None
    except OSError as error:
        raise PlanError.of("run-folder", f"no run can be written to '{out}'", found=str(error.strerror),
                           expected="a folder that can be written", remedy="choose another --out") from error


def check_free(out: Path, name: str | None) -> None:
    """Before anything is loaded. Raises PlanError for a name that is taken or would lie elsewhere, and for an ``out`` that is a file."""
    if name is not None and not NAME.fullmatch(name):
        raise PlanError.of("run-name", "a run's name is a single folder name", found=repr(name),
                           expected="letters, digits, '.', '_' and '-'", remedy="choose another --name")
    if os.path.lexists(out) and not out.is_dir():
        raise PlanError.of("run-folder", f"no run can be written to '{out}'", found="a file", expected="a folder, or a new one's name",
                           remedy="choose another --out")
    if name is not None and os.path.lexists(out / name):
        raise _exists(out / name)


def _exists(folder: Path) -> PlanError:
    return PlanError.of("run-exists", f"the run '{folder}' exists", found="a folder or file of that name", expected="a new name",
                        remedy=f"choose another --name, or leave it out; rlflow resume {folder} goes on with a run that was stopped")


def _numbered(out: Path, flow: str) -> Path:
    number = 1
    while True:
        try:
            (out / f"{flow}-{number}").mkdir()
            return out / f"{flow}-{number}"
        except FileExistsError:
            number += 1


class Records:
    """What a run writes while it goes. Every line is whole when written, so that a stopped run can be read. A disk that is full ends
    no run: that is said once, and what does not fit is written with later lines, as far as a buffer holds it."""

    def __init__(
        self, folder: Path, start: int = 0, say: Callable[[str], None] = lambda text: None, pools: Iterable[str] = ()
    ) -> None:
        """``start``: the iteration that comes first; what an earlier process wrote of it and later ones goes. ``pools``: of the run."""
        self.folder, self._say, self._said = folder, say, False
        self._open_lines(start)
        self._timeline = (folder / (f"timeline-{start}.json" if start else "timeline.json")).open("w")
        self._timeline.write("[")
        self._events = 0
        self._rows = Timeline(pools)

    def _open_lines(self, start: int) -> None:
        """Go on with what was written before an iteration."""
        for name in ("metrics.jsonl", "samples.jsonl"):
            try:
                keep_before(self.folder / name, start)
            except OSError as error:
                self._complain(name, error)
        self._metrics = (self.folder / "metrics.jsonl").open("a")
        self._samples = (self.folder / "samples.jsonl").open("a")

    def back_to(self, iteration: int) -> None:
        """Forget what was written of an iteration and of later ones: it is done again."""
        for file in (self._metrics, self._samples, self._timeline):
            self._shut(file)
        self._open_lines(iteration)
        path = Path(self._timeline.name)
        events = [line.rstrip(",") for line in path.read_text().splitlines()[1:]]
        kept = [event for event in events if _event_before(event, iteration)]
        self._timeline, self._events = path.open("w"), len(kept)
        self._put(self._timeline, "[" + "".join(("\n" if not i else ",\n") + event for i, event in enumerate(kept)))

    def settings(self, settings: Mapping[str, Any], graph: Graph) -> None:
        """Settings as JSON; the graph as text and as JSON. No secrets in any."""
        graph = without_secrets(graph)
        (self.folder / "settings.json").write_text(json.dumps(settings, indent=1, default=str) + "\n")
        (self.folder / "graph.txt").write_text(str(graph) + "\n")
        (self.folder / "graph.json").write_text(draw.as_json(graph) + "\n")
        (self.folder / GRAPH).write_bytes(wire.pack(graph))

    def metrics(self, iteration: int, values: Mapping[str, float]) -> None:
        """A line of metrics; what is not finite is written as null."""
        finite = {name: value if math.isfinite(value) else None for name, value in sorted(values.items())}
        self._line(self._metrics, {"iteration": iteration, **finite})

    def samples(self, iteration: int, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            self._line(self._samples, {"iteration": iteration, **row})

    def answers(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """answers.jsonl: held-out prompts with what the model answered before and after."""
        (self.folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def bounds(self, words: str, values: Mapping[str, Any]) -> None:
        """bounds.txt and bounds.json: what bounded the run, to read and for tools."""
        for name, text in (("bounds.txt", words), ("bounds.json", json.dumps(values, indent=1))):
            self._whole(name, text)

    def weights(self, moved: Mapping[str, Any]) -> None:
        """weights.json: the most bytes that a rank receives when weights go by a plan from a trainer to its generator, and has to, and
        what that takes."""
        self._whole("weights.json", json.dumps(moved, indent=1))

    def _whole(self, name: str, text: str) -> None:
        try:
            (self.folder / name).write_text(text + "\n")
        except OSError as error:
            self._complain(name, error)

    def timeline(self, iteration: int, outcome: Outcome) -> None:
        """Chrome trace events: Perfetto and chrome://tracing open the file."""
        for event in self._rows.events(iteration, outcome.spans, outcome.ranks):
            self._event(event)
        self._put(self._timeline, "")

    def _event(self, event: Mapping[str, Any]) -> None:
        self._put(self._timeline, (",\n" if self._events else "\n") + json.dumps(event), flush=False)
        self._events += 1

    def _line(self, file: IO[str], values: Mapping[str, Any]) -> None:
        self._put(file, json.dumps(values) + "\n")

    def _put(self, file: IO[str], text: str, flush: bool = True) -> None:
        try:
            file.write(text)
            if flush:
                file.flush()
        except OSError as error:
            self._complain(Path(file.name).name, error)

    def _complain(self, name: str, error: OSError) -> None:
        if not self._said:
            self._said = True
            self._say(f"{name} cannot be written, the run goes on: {error.strerror}")

    def close(self) -> None:
        self._put(self._timeline, "\n]\n")
        for file in (self._metrics, self._samples, self._timeline):
            self._shut(file)

    def _shut(self, file: IO[str]) -> None:
        try:
            file.close()
        except OSError as error:
            self._complain(Path(file.name).name, error)


def without_secrets(graph: Graph) -> Graph:
    """The graph with the secrets among its settings and in its files' names masked. Done to one where it is done already, it changes
    nothing."""
    nodes = (replace(node, settings=_masked(node.settings), body=node.body and without_secrets(node.body),
                     place=_masked_place(node.place), definition=_masked_place(node.definition)) for node in graph.nodes)  # fmt: skip
    return replace(graph, hp=_masked(graph.hp), nodes=tuple(nodes))


def _masked_place(place: Place | None) -> Place | None:
    return place and replace(place, path=masked(place.path))


def _masked(settings: tuple[tuple[str, Value], ...]) -> tuple[tuple[str, Value], ...]:
    found = ((name, next(iter(redacted({name: value}).values()))) for name, value in settings)
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in found)


def keep_before(path: Path, iteration: int) -> None:
    """Cut a file of JSON lines before the first that a run from ``iteration`` writes again. A line that is half written goes."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            values = json.loads(line)
        except ValueError:
            continue
        evaluated = any(name.startswith("evaluation/") for name in values)
        if values.get("iteration", -1) < iteration + evaluated:  # an evaluation after n iterations is done before iteration n begins
            kept.append(line)
    aside = path.with_suffix(".aside")
    aside.write_text("".join(kept))
    aside.replace(path)


def _event_before(line: str, iteration: int) -> bool:
    """Whether a line of the timeline is of an earlier iteration, or of none. One that is half written is not."""
    try:
        return int(json.loads(line).get("args", {}).get("iteration", -1)) < iteration
    except ValueError:
        return False


def final_models(prepared: Prepared, folder: Path) -> None:
    """A plain Hugging Face folder for each trained role: ``final/ROLE``."""
    for use in prepared.plan.graph.roles:
        trainer = prepared.engine.models[use.name].trainer if use.trained else None
        if trainer is None:
            continue
        prepared.engine.keeper.settle(computing(use.name))
        try:
            trainer.save(folder / "final" / use.name)
        except OSError as error:
            raise PlanError.of("final-model", f"the trained model of '{use.name}' cannot be written", found=str(error.strerror or error),
                               expected=f"room in {folder / 'final'}", remedy=f"make room, then: rlflow export {folder} FOLDER") from error
