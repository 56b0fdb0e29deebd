"""`rlflow plan`, `rlflow graph` and `rlflow diff`: print plans and graphs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from rlflow.author.load import load_flow
from rlflow.author.node_options import GenerateOptions
from rlflow.cli.check import check_names, read_config, roles_of, settings, trace_options
from rlflow.compiler.byte_sizes import MemoryItem
from rlflow.compiler.graph.diff import diff, same_shape
from rlflow.compiler.graph.draw import FORMATS
from rlflow.compiler.graph.model import SIDES, used_nodes
from rlflow.compiler.passes.queues import queue_words
from rlflow.compiler.preview.explanation import Explanation, devices
from rlflow.compiler.preview.sizes import LETTERS
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.config.flags import RunConfig, read_flags
from rlflow.errors import PlanError, nearest
from rlflow.monitoring.tables import output, plain
from rlflow.processes.declare import Service

TRANSPORTS = {
    "segment": "by shared memory",
    "handles": "by shared handles",
    "alltoall": "by all-to-all",
    "store": "through Ray's object store",
    "frozen": "through Ray's object store, packed as soon as they are trained",
}


def plan_file(file: str, arguments: Sequence[str]) -> int:
    """Print the plan of a file's run, and return the exit code.

    Raises FlowError and PlanError if the flow, a flag or the placement is invalid.
    """
    flow, values = load_flow(file), read_flags(arguments)
    as_json = bool(values.pop("json", False))

    from rlflow.runs.api import resolve_config
    from rlflow.runs.preview import preview

    config, hp = resolve_config(flow, None, values)
    explanation = preview(flow, hp, config, options_of(config))
    if as_json:
        print(json.dumps(explanation.as_json()))
    else:
        output(printed(explanation))
        output(section("services", [plain(f"  {line}") for line in services(config.services)]))
    return 0


def options_of(config: RunConfig) -> TraceOptions:
    """Return the options that shape the graph, as `check` reads them from flags.

    If the null backend makes up the scores, rewards don't read any columns.
    """
    options = trace_options(config)
    return (
        replace(options, reward_reads=(), reward_places={}, fields=())
        if config.has_synthetic_scores
        else options
    )


def printed(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield the output of `rlflow plan`, section by section."""
    pools = explanation.placement.pools if explanation.placement else {}
    where = (
        "pools " + ", ".join(f"{pool} ({ranks} rank{'s' * (ranks > 1)})" for pool, ranks in pools.items())
        if pools
        else "one process"
    )
    yield plain(
        f"flow {explanation.graph.name}: {explanation.assumed.prompts} prompts, {explanation.rows} rows "
        f"an iteration; {where}"
    )
    yield from section("devices", [plain(f"  {line}") for line in shared_devices(explanation)])
    yield from section("nodes", nodes(explanation))
    yield from section("due iterations, counted from 0", due(explanation))
    yield from section("nodes of the evaluation", evaluation(explanation))
    yield from section("environments", [plain(f"  {line}") for line in environments(explanation)])
    yield from section("rows of an iteration, at most", [plain(f"  {line}") for line in lineage(explanation)])
    yield from section("columns", columns(explanation))
    yield from (plain(f"  {line}") for line in sums(explanation))
    yield from section("weights", [plain(f"  {line}") for line in weights(explanation)])
    yield from section("at the same time", [plain(f"  {line}") for line in together(explanation)])
    yield from section(
        "memory of each rank, without activations", [memory(explanation.memory)] if explanation.memory else []
    )
    yield from section(
        "offloading of each rank, per iteration", [plain(f"  {line}") for line in moves(explanation)]
    )
    yield from section(
        "in-memory checkpoints, for recovery and for saving",
        [plain(f"  {line}") for line in commits(explanation)],
    )
    yield from section(
        "rows kept across iterations, over all ranks", [plain(f"  {line}") for line in buffers(explanation)]
    )
    yield from section("computed tokens", [plain(f"  {line}") for line in packed(explanation)])
    yield from section("passes", [plain(f"  {note}") for note in explanation.notes])
    yield from section(
        "time, in units of the default costs", [plain(f"  {line}") for line in times(explanation)]
    )
    yield from section("assumed", [plain(f"  {line}") for line in assumptions(explanation)])
    yield from (plain(f"\n{warning}") for warning in explanation.warnings)


def services(declared: Sequence[Service]) -> Iterator[str]:
    """Yield a line about each of the run's services."""
    for each in declared:
        gpus = f", {each.gpus} GPU{'s' * (each.gpus > 1)}" if each.gpus else ""
        yield f"{each.name}: {each.run}" + (", not started by this run" if each.external else gpus)


def shared_devices(explanation: Explanation) -> Iterator[str]:
    """Yield a line for each set of devices shared by several pools.

    It shows each pool's share, what is left unused, and which nodes overlap.
    """
    for entry in devices(explanation.placement) if explanation.placement else ():
        shares = ", ".join(f"{part:g} by {pool}" for pool, part in entry["parts"].items())
        left = (
            1 - sum(map(explanation.placement.shares.__getitem__, entry["parts"]))
            if explanation.placement
            else 0
        )
        rest = f"; {float(left):g} of each is unused" if left else ""
        yield (
            f"pools share {entry['devices']} {'device' if entry['devices'] == 1 else 'devices'}: "
            f"{shares}{rest}; ranks with the same number run on one device, and their nodes overlap"
        )


def environments(explanation: Explanation) -> Iterator[str]:
    """Yield a line for each `generate` call that uses an environment."""
    for node in used_nodes(explanation.graph):
        if isinstance(node.settings, GenerateOptions) and node.settings.environment:
            yield (
                f"{node.name}: {node.settings.environment}, at most {node.settings.max_tokens} tokens "
                "an episode"
            )


def section(title: str, parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """Yield a title and its parts, or nothing if there are no parts."""
    parts = list(parts)
    if parts:
        yield plain(f"\n{title}")
        yield from parts


def table(*heads: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table with these headings. The columns named in ``right`` are right-aligned."""
    rows = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, head in enumerate(heads):
        rows.add_column(
            ("  " if not number else "") + head, justify="right" if head in right else "left", overflow="fold"
        )
    return rows


def evaluation(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield a table of the nodes of the flow's own evaluation."""
    rows = table("wave", "node", *(("pool",) if explanation.placement else ()), "dispatch", "queue")
    for step in explanation.evaluation:
        rows.add_row(
            *map(
                plain,
                (
                    f"  {step.wave + 1}",
                    step.name,
                    *((step.pool or "",) if explanation.placement else ()),
                    step.dispatch,
                    step.lane,
                ),
            )
        )
    if explanation.evaluation:
        yield rows


def nodes(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield a table of the nodes, in an order in which they could run."""
    rows = table(
        "wave",
        "node",
        *(("pool",) if explanation.placement else ()),
        "dispatch",
        "layout" if explanation.placement else "queue",
    )
    for step in explanation.steps:
        inside = "  | " if step.within else "  "
        layout = (
            step.layout + (f", as {step.split_of}" if step.split_of else "")
            if explanation.placement
            else step.lane
        )
        cells = (
            f"{inside}{step.wave + 1}",
            step.name,
            *((step.pool or "",) if explanation.placement else ()),
            step.dispatch,
            layout,
        )
        rows.add_row(*map(plain, cells))
    yield rows


def due(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield when calls are due, if not all of them are due in every iteration.

    There is a line for each call with a schedule, and a row for each set of calls that are due together.
    """
    cycle = explanation.cycle
    if cycle is None:
        return
    for name, schedule in cycle.schedules:
        numbers = range(schedule.after, schedule.after + 3 * schedule.every, schedule.every)
        yield plain(f"  {name} ({schedule}): {', '.join(map(str, numbers))}, …")
    heads = ("first", f"of {cycle.length}", "time", "at least", "calls that are not due")
    rows = table(*heads, right=heads[:-1])
    for each in cycle.sets:
        cells = (f"  {each.first}", str(each.iterations), f"{each.makespan:g}", f"{each.bound:g}")
        rows.add_row(*map(plain, (*cells, ", ".join(each.idle))))
    yield rows


def lineage(explanation: Explanation) -> Iterator[str]:
    """Yield a line with the number of rows for each node.

    Only flows that make follow-up prompts, or choose or join rows, have such lines.
    """
    for each in explanation.lineage:
        groups = f" in {each.groups} groups" if each.groups < each.rows else ""
        unknown = (
            "" if each.known else ", if each row has one follow-up prompt; the real number depends on the run"
        )
        yield f"{each.node}: {each.rows}{groups}{unknown}"


def columns(explanation: Explanation) -> Iterator[RenderableType]:
    """Yield a table of columns.

    On pools, these are the columns that move between ranks. In a single process, they are all the columns
    that nodes read.
    """
    rows = table(
        "columns",
        "from",
        "to",
        *(("pools", "moved") if explanation.placement else ()),
        "bytes",
        right=("bytes", "moved"),
    )
    shown = [edge for edge in explanation.edges if edge.moved or not explanation.placement]
    for edge in shown:
        way = f"{edge.from_pool} to {edge.to_pool}" if edge.why == "pool" else f"{edge.to_pool}, other ranks"
        placed = (way, decimal(edge.moved)) if explanation.placement else ()
        rows.add_row(
            *map(
                plain,
                ("  " + ", ".join(edge.columns), edge.source, edge.target, *placed, decimal(edge.bytes)),
            )
        )
    if shown:
        yield rows


def sums(explanation: Explanation) -> Iterator[str]:
    """Yield a line with the bytes that an iteration reads, moves between ranks and records."""
    cycle = explanation.cycle
    read = decimal(round(cycle.mean("read")) if cycle else sum(edge.bytes for edge in explanation.edges))
    between = round(cycle.mean("moved")) if cycle else explanation.moved
    moved = f", {decimal(between)} move between ranks" if explanation.placement else ""
    mean = ", as a mean over the cycle" * bool(cycle)
    yield f"in all{mean}: nodes read {read}{moved}, the run's records read {decimal(explanation.recorded)}"


def weights(explanation: Explanation) -> Iterator[str]:
    """Yield lines about each transfer of weights from a trainer to its generator."""
    for each in explanation.weights:
        size = "" if each.bytes is None else f": {decimal(each.bytes)} over all ranks"
        most = "" if each.each is None else f", at most {decimal(each.each)} to one rank, the least possible"
        before = ", ".join(each.before) or "evaluation"
        where = (
            f"from {each.from_pool} to {each.to_pool}"
            if each.from_pool != each.to_pool
            else f"on {each.to_pool}"
        )
        yield f"{each.role} {where} after {each.after}, before {before}{size}{most}"
        if each.extra is not None:
            yield (
                f"  {TRANSPORTS[each.transport]}; in addition to the model, a transfer takes at most "
                f"{decimal(each.extra)} on a rank"
            )
        elif each.bytes is not None:
            yield "  complete tensors, through Ray's object store"


def together(explanation: Explanation) -> Iterator[str]:
    """Yield lines about how each node relates to the nodes after it.

    One line lists those that may run at the same time, another those that share its queue.
    """
    for name in dict.fromkeys(pair.first for pair in explanation.pairs):
        own = [pair for pair in explanation.pairs if pair.first == name]
        concurrent, queued = (
            [pair.second for pair in own if (pair.lane is None) is free] for free in (True, False)
        )
        if concurrent:
            yield f"{name} with {', '.join(concurrent)}"
        if queued:
            lane = next(pair.lane for pair in own if pair.lane is not None)
            yield f"{name} shares the queue {lane} with {', '.join(queued)}: one runs at a time"


def memory(entries: Sequence[MemoryItem]) -> Table:
    """Return a table of the memory used on the ranks of each pool, by role."""
    rows = table("pool", "role", "holds", "bytes", right=("bytes",))
    for pool in dict.fromkeys(item.pool for item in entries):
        own = [item for item in entries if item.pool == pool]
        for role, half in dict.fromkeys((item.role, item.half) for item in own):
            parts = [item for item in own if (item.role, item.half) == (role, half)]
            what = ", ".join(f"{item.what} {amount(item.bytes)}" for item in parts)
            rows.add_row(
                *map(plain, (f"  {pool}", f"{role}.{half}" if half in SIDES else role, what, total(parts)))
            )
        rows.add_row(*map(plain, (f"  {pool}", "all", "", total(own))))
    return rows


def moves(explanation: Explanation) -> Iterator[str]:
    """Yield lines about the parts of models that are offloaded or loaded before each node.

    There are none if memory isn't limited.
    """
    for schedule in explanation.residency:
        for step in dict.fromkeys(move.before for move in schedule.moves):
            own = [move for move in schedule.moves if move.before == step]
            ways = {
                "offload": [move for move in own if move.away],
                "load": [move for move in own if not move.away],
            }
            lines = (
                f"{way} " + ", ".join(f"{move.part} {decimal(move.bytes)}" for move in some)
                for way, some in ways.items()
                if some
            )
            yield f"{schedule.pool}, before {step}: {'; '.join(lines)}"
        without = f", {decimal(schedule.peak_without)} without offloading" if schedule.moves else ""
        yield f"{schedule.pool}: at most {decimal(schedule.peak)} of {decimal(schedule.limit)}{without}"


def commits(explanation: Explanation) -> Iterator[str]:
    """Yield lines about in-memory checkpoints, if their sizes are known."""
    sizes, every = (explanation.commits.bytes, explanation.commits.every) if explanation.commits else ({}, 0)
    known = [size for size in sizes.values() if size is not None]
    if known:
        when = "every iteration" if every == 1 else f"every {every} iterations"
        yield f"{when}: {', '.join(f'{role} {amount(size)}' for role, size in sizes.items())}"
        yield (
            f"{decimal(sum(known))} in all, twice that while the next one is made; in addition, rows that "
            "were sampled ahead of training"
        )


def buffers(explanation: Explanation) -> Iterator[str]:
    """Yield a line about the size of each buffer."""
    for each in explanation.buffers:
        yield (
            f"{each.buffer}: at most {each.rows} rows, {decimal(each.bytes)}; the driver holds as much again "
            "once they are saved"
        )


def amount(size: int | None) -> str:
    """Format a size. None gives "not known"."""
    return "not known" if size is None else decimal(size)


def total(parts: Sequence[MemoryItem]) -> str:
    """Format the sum of the known sizes, followed by "and more" if some aren't known."""
    known = [item.bytes for item in parts if item.bytes is not None]
    return (decimal(sum(known)) if known else "not known") + (
        " and more" if known and len(known) < len(parts) else ""
    )


def packed(explanation: Explanation) -> Iterator[str]:
    """Yield a line for each pass or update that computes a prompt only once for all rows that share it."""
    for each in explanation.packed:
        yield f"{each.node}: {each.computed:,} of {each.tokens:,}, as each prompt is computed once ({each.computed / each.tokens:.0%})"


def times(explanation: Explanation) -> Iterator[str]:
    """Yield lines about how long an iteration takes, in units of the default costs, and why."""
    time = explanation.time
    if cycle := explanation.cycle:
        yield (
            f"an iteration takes {cycle.mean('makespan'):g} and the lower bound of any schedule is "
            f"{cycle.mean('bound'):g}, as means over a cycle of {cycle.length} iterations"
        )
        yield f"if all calls are due: {time.makespan:g}, and at least {time.bound:g}"
    else:
        yield f"an iteration takes {time.makespan:g}; the lower bound of any schedule is {time.bound:g}"
    yield "decided by " + ", ".join(time.decided_by)
    yield "busy: " + ", ".join(f"{queue_words(lane)} {share:.0%}" for lane, share in time.busy.items())


def assumptions(explanation: Explanation) -> Iterator[str]:
    """Yield lines about what the plan assumes about the data and the run."""
    long = (
        "all of their max_tokens"
        if any(step.op == "generate" for step in explanation.steps)
        else "from the data"
    )
    yield (
        f"prompts of {explanation.assumed.prompt_tokens} tokens, responses of {explanation.response_tokens} "
        f"tokens, {long}; {LETTERS} bytes of text a token"
    )
    if any(step.op == "repeat" for step in explanation.steps):
        yield "each `repeat` gets all the groups that it needs in its first try"
    if explanation.placement:
        yield (
            "the next node keeps the split of rows: a run makes a new split if tokens are more than 10 % "
            "out of balance"
        )
    if any(item.bytes is not None for item in explanation.memory):
        yield (
            "each rank holds complete models, except for the parts that its engine shards; gradients and each "
            "of AdamW's two moments have as many elements as the trained parameters"
        )


def print_graph(file: str, format: str, arguments: Sequence[str]) -> int:
    """Print the graph of a file's flow in the format ``format``, and return 0.

    Raises FlowError and PlanError.
    """
    if format not in FORMATS:
        raise PlanError.of(
            "graph-format",
            f"unknown graph format '{format}'",
            found=format,
            expected=", ".join(FORMATS),
            nearest=nearest(format, FORMATS),
            remedy="choose one of these formats",
        )
    flow = load_flow(file)
    config = read_config(flow, read_flags(arguments))
    check_names(config, flow, roles_of(flow, config.options.reward))
    print(FORMATS[format](compile_flow(flow, settings(flow, config.hp), trace_options(config)).graph))
    return 0


def print_diff(first: str, second: str) -> int:
    """Print how the graphs of two files differ. Returns 1 if they do, else 0.

    Raises FlowError.
    """
    one, two = compile_flow(load_flow(first)).graph, compile_flow(load_flow(second)).graph
    differences = diff(one, two)
    for difference in differences:
        print(difference)
    if not differences:
        print("no difference")
    elif same_shape(one, two):
        print("(the same functions with the same connections: only names and settings differ)")
    return 1 if differences else 0
