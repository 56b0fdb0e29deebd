"""`rlflow graph` and `rlflow diff`."""

from __future__ import annotations

from collections.abc import Sequence

from rlflow.author.load import load_flow
from rlflow.cli.check import check_names, read_config, roles_of, settings, trace_options
from rlflow.compiler.graph.diff import diff, same_shape
from rlflow.compiler.graph.draw import FORMATS
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.flags import read_flags
from rlflow.errors import PlanError, nearest


def print_graph(file: str, format: str, arguments: Sequence[str]) -> int:
    """Print the graph of a file's flow in one of the formats. Raises FlowError and PlanError."""
    if format not in FORMATS:
        raise PlanError.of("graph-format", f"there is no graph format '{format}'", found=format, expected=", ".join(FORMATS),
                           nearest=nearest(format, FORMATS), remedy="choose one of them")
    flow = load_flow(file)
    config = read_config(flow, read_flags(arguments))
    check_names(config, flow, roles_of(flow, config.options.reward))
    print(FORMATS[format](compile_flow(flow, settings(flow, config.hp), trace_options(config)).graph))
    return 0


def print_diff(first: str, second: str) -> int:
    """Print what differs between the graphs of two files: 0 where nothing does, else 1. Raises FlowError."""
    one, two = compile_flow(load_flow(first)).graph, compile_flow(load_flow(second)).graph
    differences = diff(one, two)
    for difference in differences:
        print(difference)
    if not differences:
        print("no difference")
    elif same_shape(one, two):
        print("(the same functions wired alike: names and settings differ)")
    return 1 if differences else 0
