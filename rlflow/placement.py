"""Which pool runs which half of which role. Nothing is started to find out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rlflow.columns import Kind, Level
from rlflow.errors import PlanError, Problem, listed, nearest
from rlflow.graph.model import HALVES, Graph, Node, Op

GENERATORS, REST = "rollout", "train"  # two pools of these names need no flags


@dataclass(frozen=True)
class Parallel:
    """How a half of a role lies on the ranks of its pool. tensor: how many ranks compute the same rows together, as one data-parallel
    rank: adjacent ones, or with ``outer`` of n such teams every n-th. collective: every rank takes part in every call, since each holds
    a part of the weights. dims: tensors that a trainer shards along another dimension than the first, and which."""

    tensor: int = 1
    collective: bool = False
    dims: tuple[tuple[str, int], ...] = ()
    outer: bool = False

    @property
    def order(self) -> str:
        """``inner`` or ``outer``: which ranks make up a tensor-parallel group."""
        return "outer" if self.outer else "inner"

    def teams(self, ranks: int) -> list[range]:
        """The ranks of each team, of a pool of so many."""
        count = ranks // self.tensor
        return [range(k, ranks, count) if self.outer else range(k * self.tensor, (k + 1) * self.tensor) for k in range(count)]


@dataclass(frozen=True)
class Placement:
    """pools: name → ranks, in the order given. trainers and generators: role → pool, for the halves that the graph uses; a reward
    that is no model has none and runs where its input lies. parallel: (role, half) → how it lies there, where it is not plain."""

    pools: Mapping[str, int]
    trainers: Mapping[str, str] = field(default_factory=dict)
    generators: Mapping[str, str] = field(default_factory=dict)
    parallel: Mapping[tuple[str, str], Parallel] = field(default_factory=dict)

    def pool_of(self, node: Node) -> str | None:
        """The pool whose model the node runs; None for what has none."""
        if node.role is None:
            return None
        return (self.generators if node.op is Op.GENERATE else self.trainers).get(node.role)

    def lies(self, role: str, half: str) -> Parallel:
        """How the half of a role lies on its pool."""
        return self.parallel.get((role, half), Parallel())


def parse_pools(text: str) -> dict[str, int]:
    """``train=4,rollout=2`` → name → ranks. Raises PlanError."""
    pools: dict[str, int] = {}
    for item in text.split(","):
        name, _, ranks = item.strip().partition("=")
        if not re.fullmatch(r"[A-Za-z][\w-]*", name) or not ranks.isdigit() or int(ranks) < 1 or name in pools:
            raise PlanError.of("pools", f"'{item.strip()}' names no pool", found=f"--pools {text}",
                               expected="NAME=RANKS, at least 1 rank, several with commas, each name once",
                               remedy="--pools all=2, or --pools train=4,rollout=4")
        pools[name] = int(ranks)
    return pools


def place(
    graph: Graph, uses: Mapping[str, tuple[bool, bool]], pools: Mapping[str, int], given: Mapping[str, Mapping[str, object]]
) -> Placement:
    """Each role's halves on pools. ``uses``: role → whether it needs a trainer, and a generator. ``given``: role → its flags, of which
    ``pool``, ``trainer.pool`` and ``generator.pool`` are read. Raises PlanError with the flags that would settle it."""
    problems = list(_unknown(pools, given))
    chosen: dict[str, dict[str, str]] = {half: {} for half in HALVES}
    undecided: list[str] = []
    for role, needs in uses.items():
        for half, needed in zip(HALVES, needs, strict=True):
            pool = _chosen(role, half, pools, given.get(role, {}))
            if needed and pool is None:
                undecided.append(f"--{role}.{half}.pool")
            elif needed and pool is not None:
                chosen[half][role] = pool
    if problems or undecided:
        raise PlanError(*problems, *(_undecided(graph, pools, undecided) if undecided else ()))
    return Placement(dict(pools), chosen["trainer"], chosen["generator"])


def _chosen(role: str, half: str, pools: Mapping[str, int], given: Mapping[str, object]) -> str | None:
    named = given.get(f"{half}.pool", given.get("pool"))
    if named is not None:
        return str(named)
    if len(pools) == 1:
        return next(iter(pools))
    if set(pools) == {GENERATORS, REST}:
        return GENERATORS if half == "generator" else REST
    return None


def _unknown(pools: Mapping[str, int], given: Mapping[str, Mapping[str, object]]) -> Iterable[Problem]:
    for role, flags in given.items():
        for name in ("pool", *(f"{half}.pool" for half in HALVES)):
            if name in flags and str(flags[name]) not in pools:
                yield Problem("no-pool", f"--{role}.{name} names no pool", found=str(flags[name]), expected=f"one of {listed(pools)}",
                              nearest=nearest(str(flags[name]), pools), remedy="name a pool of --pools")


def _undecided(graph: Graph, pools: Mapping[str, int], flags: list[str]) -> Iterable[Problem]:
    first, *_, last = pools
    yield Problem("pool-undecided", f"nothing says which of {len(pools)} pools runs what of flow '{graph.name}'", found=listed(pools),
                  expected=f"one pool, two named {REST} and {GENERATORS}, or a pool for each half",
                  remedy=" ".join(f"{flag} {last if '.generator.' in flag else first}" for flag in flags))


# -- where each node runs ----------------------------------------------------------------------------------------------------------

TYPICAL = {Level.TOKEN: 1000, Level.PROMPT: 300, Level.TEXT: 1000, Level.ROW: 1, Level.GROUP: 1, Level.SCALAR: 0}  # entries a row
SIZES = {"bool": 1, "int64": 8, "float64": 8}


def homes(graph: Graph, placement: Placement) -> dict[int, str]:
    """The pool of each node: of a model's node its model's; of the data's the first model that reads them; of others the one that holds
    most of the bytes that they read, of equals the pool that was named first."""
    pool_of: dict[int, str] = {}
    first = next((pool for node in _all(graph) if (pool := placement.pool_of(node))), next(iter(placement.pools)))
    for node in graph.nodes:
        pool_of[node.id] = placement.pool_of(node) or _heaviest(graph, node, pool_of, placement) or first
    return pool_of


def judging(graph: Graph, placement: Placement) -> dict[str, frozenset[str]]:
    """The pools on which rows are scored by each role."""
    pools_of: dict[str, frozenset[str]] = {}
    home = homes(graph, placement)
    for node in graph.nodes:
        inner = judging(node.body, placement) if node.body else {}
        if node.op is Op.REWARD and node.role is not None:
            inner = {node.role: frozenset([home[node.id]])}
        pools_of |= {role: pools_of.get(role, frozenset()) | pools for role, pools in inner.items()}
    return pools_of


def _all(graph: Graph) -> Iterator[Node]:
    """The nodes in program order, those of `repeat` bodies in the place of the repeat."""
    for node in graph.nodes:
        yield from _all(node.body) if node.body else (node,)


def _heaviest(graph: Graph, node: Node, pool_of: Mapping[int, str], placement: Placement) -> str | None:
    bytes_on = dict.fromkeys(placement.pools, 0)
    for item in node.inputs:
        kind = graph.nodes[item.column.node].output(item.column.name).kind
        bytes_on[pool_of[item.column.node]] += typical_bytes(kind)
    return max(bytes_on, key=lambda pool: bytes_on[pool]) if any(bytes_on.values()) else None


def typical_bytes(kind: Kind | None) -> int:
    """Bytes of a row of such a column, for responses of a thousand tokens; what is not known counts as a number per row."""
    if kind is None:
        return 4
    return TYPICAL[kind.level] * (1 if kind.level is Level.TEXT else SIZES.get(kind.dtype or "", 4))
