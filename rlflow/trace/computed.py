"""Settings of calls that are scalar columns: edges of the graph, whose numbers are known when the call runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.author.signature import REQUIRED
from rlflow.columns import Level
from rlflow.errors import FlowError, Place, Problem
from rlflow.graph.model import SETTING, Input
from rlflow.trace import rules
from rlflow.trace.symbols import RecordedGraph, SymbolicColumn


@dataclass(frozen=True)
class CallSettings:
    """The settings of a call: those that have values, inputs for those that are scalar columns, and what is wrong. A setting that may not
    be a column has its default, or 1, so that the trace goes on."""

    values: dict[str, Any]
    edges: tuple[Input, ...]
    problems: tuple[Problem, ...]

    def without_edges(self, bound: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with defaults filled in, but for those that are columns."""
        columns = {item.parameter for item in self.edges}
        return {name: value for name, value in bound.items() if SETTING + name not in columns}


def call_settings(
    what: str, settings: Mapping[str, Any], defaults: Mapping[str, Any], takes: Callable[[str], bool], recorded: RecordedGraph,
    place: Place | None,
) -> CallSettings:
    """Part the settings of a call. ``takes``: whether a setting may be a column. Raises FlowError for a column of another trace."""
    values, edges, problems = dict(settings), [], []
    for name, column in settings.items():
        if not isinstance(column, SymbolicColumn):
            continue
        if column.recorded is not recorded:
            raise FlowError(rules.leaked(place))
        wrong = list(_column_problems(what, name, column, takes(name), recorded, place))
        del values[name]
        if wrong or column.source is None:
            default = defaults.get(name, REQUIRED)
            values[name] = 1 if default is REQUIRED else default
        else:
            edges.append(Input(SETTING + name, column.source.column))
        problems += wrong
    return CallSettings(values, tuple(edges), tuple(problems))


def _column_problems(
    what: str, name: str, column: SymbolicColumn, takes: bool, recorded: RecordedGraph, place: Place | None
) -> Iterator[Problem]:
    """The problems of a setting that is a column."""
    argument = f'{name}=batch["{column.name}"]'
    if not takes:
        yield Problem("setting-column", f"{what} has to know '{name}' before anything runs, so it cannot be a column", place,
                      found=argument, expected="a value, or a setting of the flow; columns may be temperature, top_p and float settings of "
                      "stages and losses", remedy=f"write {name}=hp.{name}")
    elif column.source is not None and (other := _no_number(column, recorded)):
        yield Problem("setting-column", f"{what} takes one number as '{name}', and the column is none", place, found=f"{argument}: {other}",
                      expected="a state, or a scalar column of a float",
                      remedy=f'give one number, by a stage with dispatch=RANK0 and gives={{"{name}_now": scalar(torch.float32)}}')


def _no_number(column: SymbolicColumn, recorded: RecordedGraph) -> str:
    """The kind of a column that is not one number for all ranks; empty for one that is."""
    assert column.source is not None
    kind = column.source.kind
    if kind is None or kind.level is not Level.SCALAR or kind.family == "bool":
        return str(kind or "of a kind that is not declared")
    return "one number per rank" if recorded.nodes[column.source.column.node].dispatch == "ALL" else ""
