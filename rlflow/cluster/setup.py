"""What a worker is told before its first call, and the program that it makes of it."""

from __future__ import annotations

import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import cloudpickle

import rlflow
from rlflow.author.flow import Flow
from rlflow.author.load import algorithms_folder, flows_of, load, load_text
from rlflow.columns import Kind
from rlflow.config.flags import RunConfig
from rlflow.data.scorer import ScorerSpec
from rlflow.errors import PlanError
from rlflow.graph.wire import identity
from rlflow.memory.schedule import MemorySchedule
from rlflow.placement import Placement
from rlflow.trace.compile import Program, TraceOptions, compile_flow


@dataclass(frozen=True)
class FlowSource:
    """A flow for another process: the file's text, or, for a flow that no file defines at its top, a pickle."""

    path: str
    name: str
    text: str = ""
    pickled: bytes = b""

    @staticmethod
    def of(flow: Flow) -> FlowSource:
        path = Path(flow.function.__code__.co_filename)
        try:
            if flows_of(load(path.resolve())).get(flow.function.__name__) is flow:
                return FlowSource(str(path.resolve()), flow.function.__name__, path.read_text())
        except Exception:  # not a file that loads by itself: a notebook, a test
            pass
        return FlowSource(str(path), flow.function.__name__, pickled=by_value(flow))

    def load(self) -> Flow:
        """The flow, from the text that came along."""
        if self.pickled:
            flow: Flow = cloudpickle.loads(self.pickled)
            return flow
        path = Path(self.path)
        if path.parent == algorithms_folder().resolve() and path.is_file() and path.read_text() == self.text:
            return flows_of(load(path))[self.name]
        if not path.is_file() or path.read_text() != self.text:  # another machine, or the file was changed since: messages show the text
            path = Path(f"/rlflow-{hashlib.sha256(self.text.encode()).hexdigest()[:16]}") / path.name  # which lies in no file
        return flows_of(load_text(path, self.text))[self.name]


def by_value(flow: Flow) -> bytes:
    """A pickle that needs no module of the flow's where it is read."""
    module = sys.modules.get(flow.function.__module__)
    if module is not None and not module.__name__.startswith("rlflow"):
        cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]
    pickled: bytes = cloudpickle.dumps(flow)  # type: ignore[no-untyped-call]
    return pickled


@dataclass(frozen=True)
class DataShape:
    """What rewards need to know of the data set, without its records."""

    columns: Mapping[str, Kind]
    scorer: ScorerSpec | None


@dataclass(frozen=True)
class Setup:
    """One rank of a pool. hp: the flow's settings by name, since their class is known where its file is loaded. updates: optimizer
    steps of each role over the run. meeting: the file in which the ranks of the pool meet; on
    several machines a name. course: what of its models lies in memory when, where that
    has a limit."""

    version: str
    flow: FlowSource
    hp: Mapping[str, Any] | None
    config: RunConfig
    options: TraceOptions
    graph: str
    data: DataShape
    placement: Placement
    pool: str
    rank: int
    ranks: int
    updates: Mapping[str, int]
    threads: int
    meeting: str
    course: MemorySchedule | None = None

    def program(self) -> Program:
        """The flow traced here. Raises PlanError where this is not what the driver has."""
        if self.version != rlflow.__version__:
            raise PlanError.of("worker-version", "a worker has another rlflow than the driver", found=rlflow.__version__,
                               expected=self.version, remedy="install the same version on every node")
        flow = self.flow.load()
        hp = dataclasses.replace(flow.parameters.hp, **self.hp) if self.hp is not None else None
        program = compile_flow(flow, hp, self.options)
        if identity(program.graph) != self.graph:
            raise PlanError.of("worker-graph", "the flow is another one on a worker", found=identity(program.graph), expected=self.graph,
                               remedy="let the flow depend on its settings alone")
        return program
