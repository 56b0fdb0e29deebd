"""Setup: what a worker gets when it starts, and builds the flow's program from."""

from __future__ import annotations

import copyreg
import dataclasses
import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from rlflow.author.flow import Flow
from rlflow.author.load import algorithms_folder, flows_of, load, load_text
from rlflow.compiler.graph.wire import identity
from rlflow.compiler.placement import Placement
from rlflow.compiler.residency_schedule import MemorySchedule
from rlflow.compiler.trace.compile import Program, TraceOptions, compile_flow
from rlflow.config.flags import RunConfig
from rlflow.data.scorer import DataShape
from rlflow.errors import PlanError
from rlflow.extras import VERSION


@dataclass(frozen=True)
class FlowSource:
    """A flow in a form that other processes can load: the text of its file, or a pickle.

    Flows that aren't defined at the top level of a file are pickled.
    """

    path: str  # path of the file
    name: str  # name of the flow in the file
    text: str = ""
    pickled: bytes = b""

    @staticmethod
    def of(flow: Flow) -> FlowSource:
        """Return one of this process's flows in a form that other processes can load."""
        path = Path(flow.function.__code__.co_filename)
        try:
            if flows_of(load(path.resolve())).get(flow.function.__name__) is flow:
                return FlowSource(str(path.resolve()), flow.function.__name__, path.read_text())
        except Exception:  # the file cannot be loaded by itself, as with a notebook or a test
            pass
        return FlowSource(str(path), flow.function.__name__, pickled=by_value(flow))

    def load(self) -> Flow:
        """Load and return the flow."""
        if self.pickled:
            flow: Flow = cloudpickle.loads(self.pickled)
            return flow
        path = Path(self.path)
        if path.parent == algorithms_folder().resolve() and path.is_file() and path.read_text() == self.text:
            return flows_of(load(path))[self.name]
        # if the file is missing on this machine or has changed, messages show the sent text
        if not path.is_file() or path.read_text() != self.text:
            # a path that is not a file, so that the text is used
            path = Path(f"/rlflow-{hashlib.sha256(self.text.encode()).hexdigest()[:16]}") / path.name
        return flows_of(load_text(path, self.text))[self.name]


# dataclasses compares this marker of a field without a default by identity. A plain pickle would create
# another object, which a class that was loaded in the worker would not recognise.
copyreg.pickle(type(dataclasses.MISSING), lambda missing: "MISSING")


def by_value(flow: Flow) -> bytes:
    """Pickle a flow so that another process can load it without the module that defines it."""
    module = sys.modules.get(flow.function.__module__)
    if module is not None and not module.__name__.startswith("rlflow"):
        cloudpickle.register_pickle_by_value(module)
    pickled: bytes = cloudpickle.dumps(flow)
    return pickled


@dataclass(frozen=True)
class Setup:
    """What one rank of a pool needs to set itself up."""

    version: str  # version of the driver's rlflow
    flow: FlowSource
    # settings of the flow by name; their class is known once the flow's file is loaded
    hp: Mapping[str, Any] | None
    config: RunConfig
    options: TraceOptions
    graph: str  # identity of the driver's graph
    data: DataShape
    placement: Placement
    pool: str
    rank: int
    ranks: int
    updates: Mapping[str, int]  # role → optimizer steps over the run
    threads: int  # number of torch threads
    # the rendezvous file of the pool's ranks; only a name if they are on several machines
    rendezvous: str
    # offload schedule of this rank, or None if memory isn't limited
    offload_plan: MemorySchedule | None = None

    def program(self, flow: Flow | None = None) -> Program:
        """Trace the flow in this process, and return its program.

        ``flow``: the driver's own flow, if this is the driver's process. By default, the flow is loaded from
        this setup. Raises PlanError if the graph or the version of rlflow differs from the driver's.
        """
        if self.version != VERSION:
            raise PlanError.of(
                "worker-version",
                "a worker has a different version of rlflow than the driver",
                found=VERSION,
                expected=self.version,
                remedy="install the same version on every node",
            )
        flow = flow or self.flow.load()
        hp = dataclasses.replace(flow.parameters.hp, **self.hp) if self.hp is not None else None
        program = compile_flow(flow, hp, self.options)
        if identity(program.graph) != self.graph:
            raise PlanError.of(
                "worker-graph",
                "a worker traced a different flow than the driver",
                found=identity(program.graph),
                expected=self.graph,
                remedy="make the flow depend only on its settings",
            )
        return program
