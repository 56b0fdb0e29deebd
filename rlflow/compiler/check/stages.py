"""Call each stage on synthetic rows before a run, and check what it returns or raises.

The columns have the right kinds but arbitrary numbers and strings. So only mistakes that these values can't
explain are errors: unknown names, tensor operations with wrong shapes or dtypes, and results that differ from
the declaration in number, shape or dtype.

A stage isn't called if it has side effects, gets a role's trainer, reads a column of unknown kind, or uses a
dispatch mode registered by the author.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlflow.author.columns import Kind, Level
from rlflow.author.dispatch import ALL, DP_COMPUTE
from rlflow.author.stage import Stage
from rlflow.compiler.check.losses import BY_VALUE, ROWS, TOKENS, column, column_kinds, synthetic_settings
from rlflow.compiler.graph.due import parts
from rlflow.compiler.graph.model import Graph, Node, Op
from rlflow.compiler.trace.compile import Program
from rlflow.errors import Problem, listed
from rlflow.processes.user_frames import own_lines
from rlflow.training.threads import alone

SHAPES = {Level.TOKEN: (ROWS, TOKENS), Level.ROW: (ROWS,), Level.GROUP: (ROWS,), Level.SCALAR: ()}
LONGEST = 10.0  # seconds after which a test call is abandoned without a finding
# exceptions of a stage that expects text and gets messages, or the reverse
OF_TEXT = (TypeError, AttributeError)


def stage_problems(program: Program) -> Iterator[Problem]:
    """Call a flow's stages on synthetic rows and yield the problems.

    Stages in its repeats and its evaluation are included. Each stage is called once per set of columns that
    it reads, also without those that aren't there in some iterations.
    """
    tried: set[tuple[str, tuple[str, ...]]] = set()
    for graph in (each for part in parts(program.graph) for each in _graphs(part.graph)):
        for node in graph.nodes:
            stage = program.functions.get(node.name) if node.op is not Op.IDLE else None
            if not isinstance(stage, Stage) or not stage.pure or stage.on or stage.dispatch.split is not None:
                continue
            kinds = column_kinds(graph, node, stage)
            if kinds is None or (stage.digest, tuple(sorted(kinds))) in tried:
                continue
            tried.add((stage.digest, tuple(sorted(kinds))))
            settings = {**program.settings[node.name], **synthetic_settings(node, stage)}
            yield from _call_problems(node, stage, kinds, _columns(graph, node, kinds), settings)


def _graphs(graph: Graph) -> Iterator[Graph]:
    """Yield a graph, the graphs of its repeats, and the graph of its evaluation."""
    yield graph
    for inner in (*(node.body for node in graph.nodes), graph.evaluation):
        if inner is not None:
            yield from _graphs(inner)


def _columns(graph: Graph, node: Node, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Make synthetic values of the columns that a stage reads, in the form that it gets them.

    A scalar returned by an ``ALL`` stage is a tuple with one value per rank.
    """
    rng = torch.Generator().manual_seed(0)
    columns = {name: column(name, kind, rng) for name, kind in sorted(kinds.items())}
    of_ranks = {item.parameter for item in node.inputs if graph.nodes[item.column.node].dispatch == str(ALL)}
    return {
        name: (value,) if name in of_ranks and kinds[name].level is Level.SCALAR else value
        for name, value in columns.items()
    }


def _call_problems(
    node: Node,
    stage: Stage,
    kinds: Mapping[str, Kind],
    columns: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Iterator[Problem]:
    own = dict(settings)
    if stage.draws:
        generators = tuple(torch.Generator().manual_seed(row) for row in range(ROWS))
        own["generator"] = generators if stage.dispatch == DP_COMPUTE else generators[0]
    with torch.random.fork_rng(devices=[]), alone(), contextlib.redirect_stdout(io.StringIO()):
        call = _Call(
            partial(stage.function, *(columns.get(name) for name in stage.signature.column_names), **own)
        )
        call.start()
        call.join(min(stage.timeout, LONGEST))
    if call.raised is not None:
        yield _raised(node, stage, call.raised, kinds)
    elif not call.is_alive():
        yield from _result_problems(node, stage, call.result)


class _Call(threading.Thread):
    """A call in its own thread, which the checker abandons if it takes too long."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="stage on synthetic rows", daemon=True)
        self.function, self.result = function, None
        self.raised: BaseException | None = None

    def run(self) -> None:
        """Make the call and store what it returns or raises."""
        try:
            self.result = self.function()
        except BaseException as error:  # SystemExit and KeyboardInterrupt of the stage are findings too
            self.raised = error


def _result_problems(node: Node, stage: Stage, result: Any) -> Iterator[Problem]:
    values = result if isinstance(result, tuple) else (result,)
    values = values[:-1] if values and isinstance(values[-1], dict) else values
    values = () if not stage.gives and values == (None,) else values
    if len(values) != len(stage.gives):
        yield _wrong(
            node,
            stage,
            "does not return the columns that it declares",
            f"{len(values)} results",
            f"{len(stage.gives)}: {listed(stage.gives)}",
        )
        return
    for (name, kind), value in zip(stage.gives.items(), values, strict=True):
        yield from _misfit(node, stage, name, kind, value)


def _raised(node: Node, stage: Stage, error: BaseException, kinds: Mapping[str, Kind]) -> Problem:
    """Return the problem with a stage that raised ``error`` on synthetic rows.

    It is only a note if the arbitrary values are a likely cause: if the stage itself raises the exception, or
    fails on a string.
    """
    last = traceback.extract_tb(error.__traceback__)[-1]
    refuses = linecache.getline(last.filename, last.lineno or 0).strip().startswith(
        "raise "
    ) or not isinstance(error, Exception)
    texts = any(kind.level is Level.TEXT for kind in kinds.values())
    probably = refuses or (texts and isinstance(error, (*BY_VALUE, *OF_TEXT)))
    lines, expected = own_lines(error), "columns for any rows"
    message = (
        f"stage '{stage.name}' raises {type(error).__name__} on {ROWS} rows of {TOKENS} tokens "
        "with arbitrary values"
    )
    found = f"{type(error).__name__}: {error}" + (f", raised by {lines[0]}" if lines else "")
    if not probably and not isinstance(error, (*BY_VALUE, OSError)):
        return Problem(
            "stage-raised",
            message,
            node.place,
            stage.place,
            found=found,
            expected=expected,
            remedy="correct that line",
        )
    return Problem(
        "stage-raised",
        message,
        node.place,
        stage.place,
        found=found,
        expected=expected,
        remedy="correct that line, unless rows of a real run never have such values",
        severity="note" if probably else "warning",
    )


def _wrong(node: Node, stage: Stage, message: str, finding: str, expected: str) -> Problem:
    return Problem(
        "stage-result",
        f"stage '{stage.name}' {message}",
        node.place,
        stage.place,
        found=finding,
        expected=expected,
        remedy="return the columns that `gives` declares, in the same order; or change `gives`",
    )


def _misfit(node: Node, stage: Stage, name: str, kind: Kind | None, value: Any) -> Iterator[Problem]:
    """Yield a problem if a result doesn't have the declared level and dtype."""
    if kind is None:
        return
    if kind.level is Level.TEXT:
        if not isinstance(value, list | tuple) or len(value) != ROWS:
            yield _wrong(
                node,
                stage,
                f"gives '{name}', which is not a list with one text per row",
                type(value).__name__,
                f"a list of {ROWS} texts",
            )
        return
    if kind.level is Level.PROMPT:
        return
    if value is None:
        yield _wrong(node, stage, f"gives None for '{name}'", "None", f"a tensor of {kind}")
        return
    tensor, shape = torch.as_tensor(value), SHAPES[kind.level]
    if tuple(tensor.shape) != shape:
        yield _wrong(
            node,
            stage,
            f"gives '{name}' in a shape that does not match its {kind.level.value} level",
            f"shape {list(tensor.shape)} for {ROWS} rows of {TOKENS} tokens",
            f"shape {list(shape)}",
        )
    elif (dtype := _dtype(tensor)).family != kind.family and kind.family is not None:
        yield _wrong(
            node, stage, f"gives '{name}' in a dtype other than declared", str(dtype.dtype), str(kind.dtype)
        )


def _dtype(tensor: Tensor) -> Kind:
    return Kind(Level.ROW, str(tensor.dtype).removeprefix("torch."))
