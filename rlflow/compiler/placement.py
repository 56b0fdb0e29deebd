"""Which pool runs which half of which role. Nothing is started to find out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from rlflow.author.columns import Kind, Level
from rlflow.compiler.graph.model import HALVES, Graph, Node, Op
from rlflow.errors import PlanError, Problem, listed, nearest

GENERATORS, REST = "rollout", "train"  # two pools of these names need no flags
GRAIN = 10_000  # parts in which Ray counts a device
MOST = 1 << 16  # ranks of a pool


@dataclass(frozen=True)
class Parallel:
    """How a trainer or generator is distributed over the ranks of its pool."""

    # ranks of a tensor-parallel group: they compute the same rows together, as one data-parallel rank
    tensor: int = 1
    collective: bool = False  # every rank takes part in every call, since each holds a part of the weights

    def teams(self, ranks: int) -> list[range]:
        """The ranks of each tensor-parallel group, of a pool of ``ranks``: adjacent ones."""
        return [range(first, first + self.tensor) for first in range(0, ranks, self.tensor)]


@dataclass(frozen=True)
class Placement:
    """The pool of each half of each role. A reward that is no model has no pool and runs where its input
    lies."""

    pools: Mapping[str, int]  # name → ranks, in the order of --pools
    # role → pool, for the trainers that the graph uses
    trainers: Mapping[str, str] = field(default_factory=dict)
    # role → pool, for the generators that the graph uses
    generators: Mapping[str, str] = field(default_factory=dict)
    parallel: Mapping[tuple[str, str], Parallel] = field(default_factory=dict)  # (role, half) → its layout
    # pool → its part of each of its devices; others have whole ones
    shares: Mapping[str, Fraction] = field(default_factory=dict)
    threads: bool = False  # whether ranks are threads of the run's own process, and not processes of Ray

    def devices(self) -> list[tuple[str, ...]]:
        """The pools in groups: rank k of each pool of a group lies on the group's k-th device. A pool with
        whole devices is a group of its own; of pools with parts, in their order, each takes the first device
        that has room for it."""
        groups: list[list[str]] = []
        for name in self.pools:
            part = self.shares.get(name, Fraction(1))
            group = next(
                (
                    group
                    for group in groups
                    if sum(map(self._part, group)) + part <= 1 and self.pools[group[0]] == self.pools[name]
                ),
                None,
            )
            groups.append([name]) if group is None else group.append(name)
        return [tuple(group) for group in groups]

    def _part(self, pool: str) -> Fraction:
        return self.shares.get(pool, Fraction(1))

    def processors(self) -> int:
        """The processors that a Ray of this machine needs, at least, for all ranks."""
        return sum(self.pools.values())

    def pool_of(self, node: Node) -> str | None:
        """The pool whose model the node runs; None for what has none."""
        if node.role is None:
            return None
        return (self.generators if node.op is Op.GENERATE else self.trainers).get(node.role)

    def parallelism(self, role: str, half: str) -> Parallel:
        """How a half of a role is distributed over its pool."""
        return self.parallel.get((role, half), Parallel())


THREADS = "threads"
POOL = re.compile(r"([A-Za-z][\w-]*)=([0-9]{1,9})(?:@(?:(threads)|(gpu|cpu)s?=?([0-9]*\.?[0-9]+)))?")


class Pools(str):
    """The pools of a run as ``--pools`` names them, such as ``train=4,rollout=2@gpu0.5``, and what that says;
    empty for a run without. Raises PlanError for any other text."""

    def __init__(self, text: str) -> None:
        named = {name: (ranks, kind, part) for name, ranks, kind, part in self._named()}
        kinds = {name: kind for name, (_, kind, _) in named.items()}
        shared = sorted({*kinds.values()} - {"", THREADS})
        apart = [name for name, kind in kinds.items() if kind != THREADS]
        if len(shared) > 1:
            raise PlanError.of(
                "pools",
                "pools share devices of several kinds",
                found=f"--pools {text}",
                expected="gpu for all, or cpu for all",
                remedy="ranks of a run are on one kind of device (--device)",
            )
        if 0 < len(apart) < len(named):
            raise PlanError.of(
                "pools",
                "some pools are threads of this process and others are not",
                found=f"--pools {text}",
                expected=f"@{THREADS} after every pool, or after none",
                remedy=f"add @{THREADS} to {listed(apart)}",
            )
        self.ranks = {name: ranks for name, (ranks, _, _) in named.items()}  # in their order
        # a pool's exact part of each of its devices, where named
        self.shares = {name: named[name][2] for name in apart if kinds[name]}
        self.kind = shared[0] if shared else ""  # of device that pools share: gpu, cpu, or empty
        self.threads = bool(named) and not apart  # whether all ranks are threads of the run's own process

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())

    def _named(self) -> Iterator[tuple[str, int, str, Fraction]]:
        """(name, ranks, kind of device that is named or ``threads``, part of the device) of each pool."""
        names: set[str] = set()
        for item in map(str.strip, self.split(",") if self else ()):
            match = POOL.fullmatch(item)
            name = match[1] if match else ""
            part = Fraction(match[5]) if match and match[5] else Fraction(1)
            if match is None or not 1 <= int(match[2]) <= MOST or name in names:
                raise PlanError.of(
                    "pools",
                    f"'{item}' names no pool",
                    found=f"--pools {self}",
                    expected=f"NAME=RANKS or NAME=RANKS@threads, 1 to {MOST} ranks, several with commas, "
                    "each name once",
                    remedy="--pools all=2, or --pools train=4,rollout=4",
                )
            if not 0 < part <= 1 or (part * GRAIN).denominator != 1:
                raise PlanError.of(
                    "pools",
                    f"'{item}' names no part of a device",
                    found=f"--pools {self}",
                    expected="more than 0 and at most 1, in ten-thousandths",
                    remedy=f"{name}={match[2]}@{match[4]}0.5 has half of each of {match[2]} devices",
                )
            names.add(name)
            yield name, int(match[2]), match[3] or match[4] or "", part


def place(
    graph: Graph,
    needs: Mapping[str, tuple[bool, bool]],
    pools: Mapping[str, int],
    settings: Mapping[str, Mapping[str, object]],
) -> Placement:
    """Choose a pool for each half of each role. ``needs``: role → whether it needs a trainer, and a
    generator. ``settings``: role → its settings, of which ``pool``, ``trainer.pool`` and ``generator.pool``
    are read. Raises PlanError with the flags that would settle it."""
    problems = list(_unknown(pools, settings))
    chosen: dict[str, dict[str, str]] = {half: {} for half in HALVES}
    undecided: list[str] = []
    for role, halves in needs.items():
        for half, needed in zip(HALVES, halves, strict=True):
            pool = _chosen(half, pools, settings.get(role, {}))
            if needed and pool is None:
                undecided.append(f"--{role}.{half}.pool")
            elif needed and pool is not None:
                chosen[half][role] = pool
    if problems or undecided:
        raise PlanError(*problems, *(_undecided(graph, pools, undecided) if undecided else ()))
    return Placement(dict(pools), chosen["trainer"], chosen["generator"])


def _chosen(half: str, pools: Mapping[str, int], settings: Mapping[str, object]) -> str | None:
    named = settings.get(f"{half}.pool", settings.get("pool"))
    if named is not None:
        return str(named)
    if len(pools) == 1:
        return next(iter(pools))
    if set(pools) == {GENERATORS, REST}:
        return GENERATORS if half == "generator" else REST
    return None


def _unknown(pools: Mapping[str, int], settings: Mapping[str, Mapping[str, object]]) -> Iterable[Problem]:
    for role, flags in settings.items():
        for name in ("pool", *(f"{half}.pool" for half in HALVES)):
            if name in flags and str(flags[name]) not in pools:
                yield Problem(
                    "no-pool",
                    f"--{role}.{name} names no pool",
                    found=str(flags[name]),
                    expected=f"one of {listed(pools)}",
                    nearest=nearest(str(flags[name]), pools),
                    remedy="name a pool of --pools",
                )


def _undecided(graph: Graph, pools: Mapping[str, int], flags: list[str]) -> Iterable[Problem]:
    first, *_, last = pools
    yield Problem(
        "pool-undecided",
        f"nothing says which of {len(pools)} pools runs what of flow '{graph.name}'",
        found=listed(pools),
        expected=f"one pool, two named {REST} and {GENERATORS}, or a pool for each half",
        remedy=" ".join(f"{flag} {last if '.generator.' in flag else first}" for flag in flags),
    )


# -- where each node runs
# ----------------------------------------------------------------------------------------------------------

# entries a row
TYPICAL = {
    Level.TOKEN: 1000,
    Level.PROMPT: 300,
    Level.TEXT: 1000,
    Level.ROW: 1,
    Level.GROUP: 1,
    Level.SCALAR: 0,
}
SIZES = {"bool": 1, "int64": 8, "float64": 8}


def homes(graph: Graph, placement: Placement) -> dict[int, str]:
    """The pool of each node, by id. A node of a model runs where that is; any other where most of the bytes
    lie that it reads, of equals on the pool that was named first; one that reads nothing, as the data's, with
    the first model."""
    pools: dict[int, str] = {}
    first = next(
        (pool for node in _all(graph) if (pool := placement.pool_of(node))), next(iter(placement.pools))
    )
    for node in graph.nodes:
        pools[node.id] = placement.pool_of(node) or _heaviest(graph, node, pools, placement) or first
    return pools


def reward_pools(graph: Graph, placement: Placement) -> dict[str, frozenset[str]]:
    """The pools on which each reward role scores rows."""
    pools: dict[str, frozenset[str]] = {}
    home = homes(graph, placement)
    for node in graph.nodes:
        inner = reward_pools(node.body, placement) if node.body else {}
        if node.op is Op.REWARD and node.role is not None:
            inner = {node.role: frozenset([home[node.id]])}
        pools |= {role: pools.get(role, frozenset()) | more for role, more in inner.items()}
    evaluating = reward_pools(graph.evaluation, placement) if graph.evaluation else {}
    return {
        role: pools.get(role, frozenset()) | evaluating.get(role, frozenset())
        for role in {**pools, **evaluating}
    }


def _all(graph: Graph) -> Iterator[Node]:
    """All nodes in program order, those of a `repeat` body in the place of the repeat."""
    for node in graph.nodes:
        yield from _all(node.body) if node.body else (node,)


def _heaviest(graph: Graph, node: Node, home: Mapping[int, str], placement: Placement) -> str | None:
    """The pool with the most bytes that a node reads. ``home``: the pools of earlier nodes, by id. None where
    it reads nothing."""
    bytes_on = dict.fromkeys(placement.pools, 0)
    for item in node.inputs:
        kind = graph.nodes[item.column.node].output(item.column.name).kind
        bytes_on[home[item.column.node]] += typical_bytes(kind)
    return max(bytes_on, key=lambda pool: bytes_on[pool]) if any(bytes_on.values()) else None


def typical_bytes(kind: Kind | None) -> int:
    """Bytes of a row of a column of this kind, for responses of a thousand tokens; an unknown kind counts as
    a number per row."""
    if kind is None:
        return 4
    return TYPICAL[kind.level] * (1 if kind.level is Level.TEXT else SIZES.get(kind.dtype or "", 4))
