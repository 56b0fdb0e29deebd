"""`rlflow plan`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import RenderableType
from rich.filesize import decimal
from rich.table import Table

from rlflow.author.load import load_flow
from rlflow.cli.check import trace_options
from rlflow.config.flags import RunConfig, parse_flags, read_toml
from rlflow.explain.explanation import Explanation
from rlflow.explain.sizes import LETTERS
from rlflow.graph.model import HALVES
from rlflow.memory.sizes import MemoryItem
from rlflow.trace.compile import TraceOptions
from rlflow.watch.tables import output, plain

TRANSPORTS = {"segment": "by shared memory", "handles": "by shared handles", "alltoall": "by all-to-all",
              "store": "through Ray's object store", "frozen": "through Ray's object store, packed as soon as they are trained"}


def plan_file(file: str, arguments: Sequence[str]) -> int:
    """Print the plan of a run of the file. Raises FlowError and PlanError for what does not fit."""
    flow, flags = load_flow(file), parse_flags(arguments)
    config = flags.pop("config", None)
    values = (read_toml(Path(config)) if config else {}) | flags
    as_json = bool(values.pop("json", False))

    from rlflow.runs.api import resolve_config
    from rlflow.runs.preview import preview

    config, hp = resolve_config(flow, None, values)
    explanation = preview(flow, hp, config, options_of(config))
    if as_json:
        print(json.dumps(explanation.as_json()))
    else:
        output(printed(explanation))
    return 0


def options_of(config: RunConfig) -> TraceOptions:
    """What of the flags shapes the graph, as for `check`; the reward of the null backend reads nothing."""
    options = trace_options(config)
    return TraceOptions(options.rewards, (), sampling=config.sampling) if config.judged_by_nothing else options


def printed(found: Explanation) -> Iterator[RenderableType]:
    """Section by section."""
    pools = found.placement.pools if found.placement else {}
    where = "pools " + ", ".join(f"{pool} ({ranks} rank{'s' * (ranks > 1)})" for pool, ranks in pools.items()) if pools else "one process"
    yield plain(f"flow {found.graph.name}: {found.assumed.prompts} prompts, {found.rows} rows an iteration; {where}")
    yield from section("nodes", nodes(found))
    yield from section("columns", columns(found))
    yield from (plain(f"  {line}") for line in sums(found))
    yield from section("weights", [plain(f"  {line}") for line in weights(found)])
    yield from section("at the same time", [plain(f"  {line}") for line in together(found)])
    yield from section("memory of each rank, without activations", [memory(found.memory)] if found.memory else [])
    yield from section("moves of each rank, an iteration", [plain(f"  {line}") for line in moves(found)])
    yield from section("copies outside of the workers, for recovery", [plain(f"  {line}") for line in commits(found)])
    yield from section("passes", [plain(f"  {did}") for did in found.did])
    yield from section("time, in units of the default costs", [plain(f"  {line}") for line in times(found)])
    yield from section("assumed", [plain(f"  {line}") for line in assumptions(found)])
    yield from (plain(f"\n{warning}") for warning in found.warnings)


def section(title: str, parts: Iterable[RenderableType]) -> Iterator[RenderableType]:
    """A title and what is under it, where there is anything."""
    parts = list(parts)
    if parts:
        yield plain(f"\n{title}")
        yield from parts


def table(*heads: str, right: Iterable[str] = ()) -> Table:
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for number, head in enumerate(heads):
        made.add_column(("  " if not number else "") + head, justify="right" if head in right else "left", overflow="fold")
    return made


def nodes(found: Explanation) -> Iterator[RenderableType]:
    made = table("wave", "node", *(("pool",) if found.placement else ()), "dispatch", "layout" if found.placement else "lane")
    for step in found.steps:
        inside = "  | " if step.within else "  "
        layout = step.layout + (f", as {step.split_of}" if step.split_of else "") if found.placement else step.lane
        cells = (f"{inside}{step.wave + 1}", step.name, *((step.pool or "",) if found.placement else ()), step.dispatch, layout)
        made.add_row(*map(plain, cells))
    yield made


def columns(found: Explanation) -> Iterator[RenderableType]:
    """On pools what moves; in one process all that is read."""
    made = table("columns", "from", "to", *(("pools", "moved") if found.placement else ()), "bytes", right=("bytes", "moved"))
    shown = [edge for edge in found.edges if edge.moved or not found.placement]
    for edge in shown:
        way = f"{edge.from_pool} to {edge.to_pool}" if edge.why == "pool" else f"{edge.to_pool}, other ranks"
        placed = (way, decimal(edge.moved)) if found.placement else ()
        made.add_row(*map(plain, ("  " + ", ".join(edge.columns), edge.source, edge.target, *placed, decimal(edge.bytes))))
    if shown:
        yield made


def sums(found: Explanation) -> Iterator[str]:
    read = decimal(sum(edge.bytes for edge in found.edges))
    moved = f"; {decimal(found.moved)} change ranks" if found.placement else ""
    yield f"in all {read} are read by nodes{moved}; {decimal(found.recorded)} by the run's records"


def weights(found: Explanation) -> Iterator[str]:
    for each in found.weights:
        size = "" if each.bytes is None else f": {decimal(each.bytes)} over all ranks"
        most = "" if each.each is None else f", at most {decimal(each.each)} to one, the least possible"
        before = ", ".join(each.before) or "evaluation"
        where = f"from {each.from_pool} to {each.to_pool}" if each.from_pool != each.to_pool else f"on {each.to_pool}"
        yield f"{each.role} {where} after {each.after}, before {before}{size}{most}"
        if each.extra is not None:
            yield f"  {TRANSPORTS[each.transport]}; a transfer takes at most {decimal(each.extra)} on a rank beside the model"
        elif each.bytes is not None:
            yield "  whole tensors, through Ray's object store"
        yield from (f"  {line}" for line in each.advice)


def together(found: Explanation) -> Iterator[str]:
    """For each node those after it in program order that it need not wait for."""
    for name in dict.fromkeys(pair.first for pair in found.pairs):
        mine = [pair for pair in found.pairs if pair.first == name]
        beside, taking = ([pair.second for pair in mine if (pair.lane is None) is free] for free in (True, False))
        if beside:
            yield f"{name} beside {', '.join(beside)}"
        if taking:
            lane = next(pair.lane for pair in mine if pair.lane is not None)
            yield f"{name} takes turns with {', '.join(taking)} in {lane}"


def memory(entries: Sequence[MemoryItem]) -> Table:
    made = table("pool", "role", "holds", "bytes", right=("bytes",))
    for pool in dict.fromkeys(held.pool for held in entries):
        mine = [held for held in entries if held.pool == pool]
        for role, half in dict.fromkeys((held.role, held.half) for held in mine):
            parts = [held for held in mine if (held.role, held.half) == (role, half)]
            what = ", ".join(f"{held.what} {amount(held.bytes)}" for held in parts)
            made.add_row(*map(plain, (f"  {pool}", f"{role}.{half}" if half in HALVES else role, what, total(parts))))
        made.add_row(*map(plain, (f"  {pool}", "all", "", total(mine))))
    return made


def moves(found: Explanation) -> Iterator[str]:
    """Where memory has a limit: before which node what goes, and what comes."""
    for course in found.residency:
        for step in dict.fromkeys(move.before for move in course.moves):
            mine = [move for move in course.moves if move.before == step]
            ways = {"away": [move for move in mine if move.away], "back": [move for move in mine if not move.away]}
            told = (f"{way} " + ", ".join(f"{move.part} {decimal(move.bytes)}" for move in some) for way, some in ways.items() if some)
            yield f"{course.pool}, before {step}: {'; '.join(told)}"
        without = f", {decimal(course.peak_without)} if nothing moved" if course.moves else ""
        yield f"{course.pool}: at most {decimal(course.peak)} of {decimal(course.limit)}{without}"


def commits(found: Explanation) -> Iterator[str]:
    """Where anything is known of them."""
    sizes, every = (found.commits.bytes, found.commits.every) if found.commits else ({}, 0)
    known = [size for size in sizes.values() if size is not None]
    if known:
        when = "every iteration" if every == 1 else f"every {every} iterations"
        yield f"{when}: {', '.join(f'{role} {amount(size)}' for role, size in sizes.items())}"
        yield f"{decimal(sum(known))} in all, twice that while the next is taken; and rows that are sampled ahead"


def amount(size: int | None) -> str:
    return "not known" if size is None else decimal(size)


def total(parts: Sequence[MemoryItem]) -> str:
    """What is known of the sum."""
    known = [held.bytes for held in parts if held.bytes is not None]
    return (decimal(sum(known)) if known else "not known") + (" and more" if known and len(known) < len(parts) else "")


def times(found: Explanation) -> Iterator[str]:
    time = found.time
    yield f"an iteration takes {time.makespan:g}; no schedule takes less than {time.bound:g}"
    yield "decided by " + ", ".join(time.decided_by)
    yield "busy: " + ", ".join(f"{lane} {share:.0%}" for lane, share in time.busy.items())


def assumptions(found: Explanation) -> Iterator[str]:
    long = "all of their max_tokens" if any(step.op == "generate" for step in found.steps) else "which the data hold"
    yield (f"prompts of {found.assumed.prompt_tokens} tokens, responses of {found.response_tokens} tokens, {long}; "
           f"{LETTERS} bytes of text a token")
    if any(step.op == "repeat" for step in found.steps):
        yield "a repeat keeps all the groups that it wants, in its first try"
    if found.placement:
        yield "a split is kept for the next node: a run makes a new one where tokens are more than 10 % off balance"
    if any(held.bytes is not None for held in found.memory):
        yield "each rank holds whole models but for what its engine divides; gradients and AdamW's two moments are as long as what learns"
