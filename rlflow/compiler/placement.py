"""Placement: which pools trainers and generators run on, decided before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from rlflow.author.columns import Kind, Level
from rlflow.compiler.graph.model import SIDES, Graph, Node, Op
from rlflow.errors import PlanError, Problem, listed, nearest

GENERATORS, REST = "rollout", "train"  # if the two pools have these names, no flags are needed to place roles
GRAIN = 10_000  # Ray counts a device in this many parts
MOST = 1 << 16  # maximum ranks of a pool


@dataclass(frozen=True)
class Parallel:
    """How a trainer or generator is spread over the ranks of its pool."""

    # ranks of a tensor-parallel group: they process the same rows together, as one data-parallel rank
    tensor: int = 1
    # True: every rank takes part in every call, because each holds a part of the weights
    collective: bool = False

    def teams(self, ranks: int) -> list[range]:
        """Split a pool of this many ranks into tensor-parallel groups of adjacent ranks."""
        return [range(first, first + self.tensor) for first in range(0, ranks, self.tensor)]


@dataclass(frozen=True)
class Placement:
    """The pool of each trainer and generator.

    Reward functions aren't placed on a pool; they run where their input is stored.
    """

    pools: Mapping[str, int]  # name → ranks, in the order of --pools
    # role → pool of its trainer, for the trainers that the graph uses
    trainers: Mapping[str, str] = field(default_factory=dict)
    # role → pool of its generator, for the generators that the graph uses
    generators: Mapping[str, str] = field(default_factory=dict)
    parallel: Mapping[tuple[str, str], Parallel] = field(default_factory=dict)  # (role, side) → its layout
    # pool → the part that it gets of each of its devices; pools without an entry get full devices
    shares: Mapping[str, Fraction] = field(default_factory=dict)
    threads: bool = False  # True: ranks are threads of the run's own process instead of Ray processes

    def devices(self) -> list[tuple[str, ...]]:
        """Group pools that share devices.

        In a group, rank k of each pool uses the k-th device. A pool whose ranks need whole devices gets its
        own group. A pool whose ranks need only a part joins the first group with as many ranks and enough
        room.
        """
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
        """How many processors Ray needs on this machine, at least, for all ranks."""
        return sum(self.pools.values())

    def pool_of(self, node: Node) -> str | None:
        """Return the pool of the model that the node uses, or None if it doesn't use one."""
        if node.role is None:
            return None
        return (self.generators if node.op is Op.GENERATE else self.trainers).get(node.role)

    def parallelism(self, role: str, half: str) -> Parallel:
        """Return how a role's trainer or generator (``half``) is spread over its pool."""
        return self.parallel.get((role, half), Parallel())


THREADS = "threads"
POOL = re.compile(r"([A-Za-z][\w-]*)=([0-9]{1,9})(?:@(?:(threads)|(gpu|cpu)s?=?([0-9]*\.?[0-9]+)))?")


class Pools(str):
    """The value of ``--pools``, such as ``train=4,rollout=2@gpu0.5``, parsed.

    An empty string stands for a run without pools. Raises PlanError if the string isn't valid.
    """

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
                remedy="use one kind of device for all ranks (--device)",
            )
        if 0 < len(apart) < len(named):
            raise PlanError.of(
                "pools",
                "some pools are threads of this process and others are not",
                found=f"--pools {text}",
                expected=f"@{THREADS} after every pool, or after none",
                remedy=f"add @{THREADS} to {listed(apart)}",
            )
        self.ranks = {name: ranks for name, (ranks, _, _) in named.items()}  # in the order of --pools
        # pool → the exact part that it gets of each of its devices, if the text names a part
        self.shares = {name: named[name][2] for name in apart if kinds[name]}
        self.kind = shared[0] if shared else ""  # kind of device that pools share: gpu, cpu, or empty
        self.threads = bool(named) and not apart  # True: all ranks are threads of the run's own process

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(cls, core_schema.str_schema())

    def _named(self) -> Iterator[tuple[str, int, str, Fraction]]:
        """Yield each pool's name, ranks, kind of device (or ``threads``, or empty), and part of a device."""
        names: set[str] = set()
        for item in map(str.strip, self.split(",") if self else ()):
            match = POOL.fullmatch(item)
            name = match[1] if match else ""
            part = Fraction(match[5]) if match and match[5] else Fraction(1)
            if match is None or not 1 <= int(match[2]) <= MOST or name in names:
                raise PlanError.of(
                    "pools",
                    f"'{item}' is not a valid pool",
                    found=f"--pools {self}",
                    expected=f"NAME=RANKS or NAME=RANKS@threads, 1 to {MOST} ranks, several with commas, "
                    "each name once",
                    remedy="--pools all=2, or --pools train=4,rollout=4",
                )
            if not 0 < part <= 1 or (part * GRAIN).denominator != 1:
                raise PlanError.of(
                    "pools",
                    f"'{item}' does not give a valid part of a device",
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
    """Choose a pool for each role's trainer and generator.

    ``needs``: role → (needs a trainer, needs a generator). ``pools``: pool → number of ranks. ``settings``:
    role → its settings, of which ``pool``, ``trainer.pool`` and ``generator.pool`` matter here. If there's
    more than one way, raises PlanError naming the flags that would settle it.
    """
    problems = list(_unknown(pools, settings))
    chosen: dict[str, dict[str, str]] = {half: {} for half in SIDES}
    undecided: list[str] = []
    for role, sides in needs.items():
        for half, needed in zip(SIDES, sides, strict=True):
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
        for name in ("pool", *(f"{half}.pool" for half in SIDES)):
            if name in flags and str(flags[name]) not in pools:
                yield Problem(
                    "no-pool",
                    f"--{role}.{name} does not name a pool of --pools",
                    found=str(flags[name]),
                    expected=f"one of {listed(pools)}",
                    nearest=nearest(str(flags[name]), pools),
                    remedy="name a pool of --pools",
                )


def _undecided(graph: Graph, pools: Mapping[str, int], flags: list[str]) -> Iterable[Problem]:
    first, *_, last = pools
    yield Problem(
        "pool-undecided",
        f"the flags do not decide which of {len(pools)} pools runs which trainer or generator of flow "
        f"'{graph.name}'",
        found=listed(pools),
        expected=f"one pool, two named {REST} and {GENERATORS}, or a pool for each trainer and generator",
        remedy=" ".join(f"{flag} {last if '.generator.' in flag else first}" for flag in flags),
    )


# -- where each node runs
# ----------------------------------------------------------------------------------------------------------

# typical entries per row
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
    """Return the pool that runs each node, by node id.

    A node that uses a model runs on the model's pool. Any other node runs on the pool that stores the most
    bytes of its input; if there's a tie, the first one in ``--pools`` wins. A node without input, such as the
    data, runs on the pool of the first model.
    """
    pools: dict[int, str] = {}
    first = next(
        (pool for node in _all(graph) if (pool := placement.pool_of(node))), next(iter(placement.pools))
    )
    for node in graph.nodes:
        pools[node.id] = placement.pool_of(node) or _heaviest(graph, node, pools, placement) or first
    return pools


def reward_pools(graph: Graph, placement: Placement) -> dict[str, frozenset[str]]:
    """For each reward role, return the pools that its calls run on."""
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
    """Yield all nodes in program order, with each `repeat` replaced by the nodes in its body."""
    for node in graph.nodes:
        yield from _all(node.body) if node.body else (node,)


def _heaviest(graph: Graph, node: Node, home: Mapping[int, str], placement: Placement) -> str | None:
    """Return the pool that stores the most bytes of a node's input, or None if it has no input.

    ``home``: the pools of all earlier nodes, by id.
    """
    bytes_on = dict.fromkeys(placement.pools, 0)
    for item in node.inputs:
        kind = graph.nodes[item.column.node].output(item.column.name).kind
        bytes_on[home[item.column.node]] += typical_bytes(kind)
    return max(bytes_on, key=lambda pool: bytes_on[pool]) if any(bytes_on.values()) else None


def typical_bytes(kind: Kind | None) -> int:
    """Estimate a column's bytes per row, for responses of a thousand tokens.

    A column of unknown kind (None) counts as one number per row.
    """
    if kind is None:
        return 4
    return TYPICAL[kind.level] * (1 if kind.level is Level.TEXT else SIZES.get(kind.dtype or "", 4))
