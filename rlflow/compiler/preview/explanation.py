"""All the numbers of a plan, for `rlflow plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlflow.compiler.byte_sizes import MemoryItem, ModelFootprint
from rlflow.compiler.graph.model import Graph
from rlflow.compiler.passes.queues import room_of
from rlflow.compiler.passes.rank import COST
from rlflow.compiler.placement import Placement
from rlflow.compiler.plan import PassNote, Plan
from rlflow.compiler.preview.cycles import Cycle, cycle_of
from rlflow.compiler.preview.edges import Edge, WeightEdge, edges, followed, weights
from rlflow.compiler.preview.layouts import Layouts
from rlflow.compiler.preview.sizes import (
    Assumed,
    BufferSize,
    ComputedTokens,
    NodeRows,
    Sizes,
    buffer_sizes,
    computed,
    rows_of_rows,
)
from rlflow.compiler.preview.waves import Pair, WaveNode, pairs, steps
from rlflow.compiler.residency_schedule import MemorySchedule
from rlflow.compiler.simulate import Simulation, simulate
from rlflow.errors import Problem

PROCESS = "this process"  # name of the only pool of a run without pools


@dataclass(frozen=True)
class Commits:
    """A run's in-memory checkpoints (commits), made every ``every`` iterations.

    ``bytes``: the size of each role's checkpoint (None if unknown), for roles that an iteration may change.
    """

    every: int
    bytes: Mapping[str, int | None]


@dataclass(frozen=True)
class Explanation:
    """The numbers of one iteration: placement, data movement, memory and time."""

    graph: Graph  # the graph at these settings
    placement: Placement | None  # None in one process
    assumed: Assumed  # assumptions about sizes that are unknown before a run
    rows: int  # sampled rows of an iteration
    steps: tuple[WaveNode, ...]  # nodes in waves
    edges: tuple[Edge, ...]  # columns from node to node
    weights: tuple[WeightEdge, ...]  # weights from trainers to generators
    pairs: tuple[Pair, ...]  # nodes that can run at the same time
    recorded: int  # bytes of columns that one rank gets for the run's records
    memory: tuple[MemoryItem, ...]  # memory of models on each rank
    notes: tuple[PassNote, ...]  # what each pass did
    time: Simulation  # the iteration in virtual time, in units of ``plan.COST``
    warnings: tuple[Problem, ...] = ()  # warnings of the check
    response_tokens: int = 0  # maximum total number of tokens in all responses
    commits: Commits | None = None  # commits; None if there are no commits
    # rows that each node makes, if the flow has follow-up prompts, chosen rows or joined rows
    lineage: tuple[NodeRows, ...] = ()
    buffers: tuple[BufferSize, ...] = ()  # rows that the flow keeps across iterations
    # memory schedules, if memory has a limit
    residency: tuple[MemorySchedule, ...] = ()
    evaluation: tuple[WaveNode, ...] = ()  # nodes of the flow's own evaluation, in waves
    packed: tuple[ComputedTokens, ...] = ()  # tokens run through models, if rows share prompts
    # when calls are due, if not all are in every iteration. All other numbers are those of an iteration in
    # which all calls are due
    cycle: Cycle | None = None

    @property
    def moved(self) -> int:
        """How many bytes of columns move to another rank in an iteration."""
        return sum(edge.moved for edge in self.edges)

    def as_json(self) -> dict[str, Any]:
        """Return the numbers as plain values, under stable keys that docs/runs.md explains."""
        placed = self.placement or Placement({})
        sides = {"trainer": placed.trainers, "generator": placed.generators}
        roles = {
            role: {half: where.get(role) for half, where in sides.items()}
            for role in {**placed.trainers, **placed.generators}
        }
        return {
            "flow": self.graph.name,
            "pools": dict(placed.pools),
            "roles": roles,
            "devices": devices(placed),
            "assumed": asdict(self.assumed) | {"response_tokens": self.response_tokens, "rows": self.rows},
            "lineage": [asdict(each) for each in self.lineage],
            "packed": [asdict(each) for each in self.packed],
            "nodes": [asdict(step) for step in self.steps],
            "evaluation": [asdict(step) for step in self.evaluation],
            "cycle": asdict(self.cycle) if self.cycle else None,
            "edges": [asdict(edge) for edge in self.edges],
            "weights": [asdict(each) for each in self.weights],
            "pairs": [asdict(pair) for pair in self.pairs],
            "bytes": {
                "read": self.cycle.mean("read") if self.cycle else sum(edge.bytes for edge in self.edges),
                "moved": self.cycle.mean("moved") if self.cycle else self.moved,
                "recorded": self.recorded,
            },
            "memory": [asdict(item) for item in self.memory],
            "residency": [_resident(schedule) for schedule in self.residency],
            "commits": asdict(self.commits) if self.commits else None,
            "buffers": [asdict(each) for each in self.buffers],
            "passes": {note.name: note.what for note in self.notes},
            "time": {
                "makespan": self.cycle.mean("makespan") if self.cycle else self.time.makespan,
                "bound": self.cycle.mean("bound") if self.cycle else self.time.bound,
                "busy": self.time.busy,
                "critical": self.time.decided_by,
                "costs": {str(op): cost for op, cost in COST.items()},
            },
            "warnings": [{"code": warning.code, "text": str(warning)} for warning in self.warnings],
        }


def devices(placement: Placement) -> list[dict[str, Any]]:
    """List the groups of pools that share devices.

    Each entry has the number of devices, and each pool's part of a device. If no pools share devices, the
    list is empty.
    """
    return [
        {
            "devices": placement.pools[names[0]],
            "parts": {name: float(placement.shares[name]) for name in names},
        }
        for names in placement.devices()
        if placement.shares.keys() & set(names)
    ]


def here(sides: Mapping[str, tuple[bool, bool]]) -> Placement:
    """Place everything in one process. ``sides``: role → (has a trainer, has a generator)."""
    trainers, generators = (
        {role: PROCESS for role, has in sides.items() if has[number]} for number in (0, 1)
    )
    return Placement({PROCESS: 1}, trainers, generators)


def explain(
    plan: Plan,
    where: Placement,
    assumed: Assumed,
    models: Mapping[str, ModelFootprint],
    frozen: Sequence[tuple[str, str, ModelFootprint]],
    warnings: Sequence[Problem] = (),
    commit_every: int = 0,
    ways: tuple[str, str] = ("segment", "segment"),
) -> Explanation:
    """Compute all the numbers of a plan.

    where: the plan's placement, or a placement of everything in one process (``here``).

    models: role → its model's memory, for roles with a model.

    frozen: (pool, name, memory) for each reward model with its own folder.

    ways: how weights are sent to generators on the trainer's own pool, and on other pools.
    """
    sizes, room = Sizes.of(plan.graph, assumed), room_of(plan.placement)
    layouts = Layouts.of(plan, sizes) if plan.placement else None
    return Explanation(
        graph=plan.graph,
        placement=plan.placement,
        assumed=assumed,
        rows=max(sizes.rows.values()),
        steps=tuple(steps(plan, layouts)),
        edges=tuple(edges(plan, sizes, layouts)),
        weights=(
            *weights(plan.graph, plan.placement, models, ways),
            *followed(plan.graph, plan.placement, models, "store" if ways[1] == "frozen" else ways[1]),
        )
        if plan.placement
        else (),
        pairs=tuple(pairs(plan, room)),
        recorded=sum(sizes.given(column) for column in plan.keep_until_end),
        memory=tuple(memory(where, models, frozen)),
        notes=tuple(passes(plan)),
        time=simulate(plan, lambda node: COST.get(node.op, 0.0), room),
        warnings=tuple(warnings),
        response_tokens=sizes.longest,
        commits=commits(plan, models, commit_every),
        lineage=tuple(rows_of_rows(sizes)),
        buffers=tuple(buffer_sizes(sizes)),
        residency=plan.residency,
        evaluation=tuple(steps(plan.evaluation, None)) if plan.evaluation else (),
        packed=tuple(computed(plan.prompt_rows, sizes)),
        cycle=cycle_of(plan, assumed),
    )


def _resident(schedule: MemorySchedule) -> dict[str, Any]:
    moments = (
        {
            "step": moment.step,
            "bytes": schedule.held(moment, awake),
            "there": [str(part) for part in sorted(awake)],
            "passing": {str(part): size for part, size in moment.passing.items()},
        }
        for moment, awake in zip(schedule.moments, schedule.awake, strict=True)
    )
    moves = [
        {
            "before": move.before,
            "part": str(move.part),
            "bytes": move.bytes,
            "to": "away" if move.away else "memory",
        }
        for move in schedule.moves
    ]
    return {
        "pool": schedule.pool,
        "limit": schedule.limit,
        "peak": schedule.peak,
        "peak_without": schedule.peak_without,
        "always": sum(schedule.fixed.values()),
        "moments": list(moments),
        "moves": moves,
    }


def commits(plan: Plan, models: Mapping[str, ModelFootprint], every: int) -> Commits | None:
    """Return a run's in-memory checkpoints, or None if ``every`` is 0.

    They cover roles whose weights an iteration may change.
    """
    changed = [role for role in plan.graph.changed_roles if role in models]
    return Commits(every, {role: models[role].commit_bytes for role in changed}) if every else None


def passes(plan: Plan) -> Iterator[PassNote]:
    """Yield the notes of all passes, including those on the bodies of repeats."""
    yield from plan.notes
    for i, body in plan.bodies.items():
        yield from (
            PassNote(f"{note.name} of {plan.graph.nodes[i].name}", note.what) for note in passes(body)
        )


def memory(
    where: Placement, models: Mapping[str, ModelFootprint], frozen: Sequence[tuple[str, str, ModelFootprint]]
) -> Iterator[MemoryItem]:
    """Yield each model's memory on each rank, by pool and then in the order of the roles."""
    for pool in where.pools:
        for role, footprint in models.items():
            if where.trainers.get(role) == pool:
                yield from (
                    MemoryItem(pool, role, "trainer", name, size)
                    for name, size in footprint.trainer().items()
                )
            if where.generators.get(role) == pool:
                yield from (
                    MemoryItem(pool, role, "generator", name, size)
                    for name, size in footprint.generator().items()
                )
        yield from (
            MemoryItem(pool, name, "reward", "weights", footprint.weight_bytes)
            for at, name, footprint in frozen
            if at == pool
        )
