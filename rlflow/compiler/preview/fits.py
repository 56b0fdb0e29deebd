"""Find problems with a placement before a run starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rlflow.author.node_options import GenerateOptions, RepeatOptions, UpdateOptions
from rlflow.compiler.graph.model import SIDES, Graph, Node, used_nodes
from rlflow.compiler.placement import GENERATORS, REST, Placement
from rlflow.compiler.plan import Plan
from rlflow.compiler.preview.sizes import Sizes
from rlflow.errors import Problem, listed


def side_problems(
    graph: Graph,
    sides: Mapping[str, tuple[bool, bool]],
    settings: Mapping[str, Iterable[str]],
    owned: Mapping[str, Mapping[str, set[str]]],
) -> Iterator[Problem]:
    """Yield a problem for each flag that sets up a trainer or generator that its role doesn't have.

    sides: role → (has a trainer, has a generator); if both are False, it has no model. settings: role → names
    of the flags that the user gave. owned: role → "trainer" or "generator" → settings that only this side of
    its backend has. Roles that the flow doesn't use with its current settings are skipped.
    """
    used = {node.role for node in used_nodes(graph) if node.role}
    for role in sorted(used.intersection(settings)):
        has = dict(zip(SIDES, sides.get(role, (False, False)), strict=True))
        for flag in settings[role]:
            own = {half: {half, *owned.get(role, {}).get(half, ())} for half in SIDES}
            half = next((half for half in SIDES if flag in own[half] or flag.startswith(f"{half}.")), None)
            if (half is not None and not has[half]) or (flag == "pool" and not any(has.values())):
                yield _no_side(graph, role, flag, has)


def _no_side(graph: Graph, role: str, flag: str, has: Mapping[str, bool]) -> Problem:
    present = [half for half, there in has.items() if there]
    what = (
        f"only a {' and a '.join(present)}"
        if present
        else "no model of its own: its rewards run where their rows are stored"
    )
    message = (
        f"--{role}.{flag} is for a side (trainer or generator) that role '{role}' of flow '{graph.name}' "
        "does not have"
    )
    return Problem(
        "no-half",
        message,
        found=f"--{role}.{flag}",
        expected=f"flags of a role with {what}",
        remedy=f"remove --{role}.{flag}",
    )


def short_repeats(graph: Graph, sizes: Sizes) -> Iterator[Problem]:
    """Yield a problem for each `repeat` that can't sample enough groups, even with all its tries."""
    for node in graph.nodes:
        repeat = node.settings
        if isinstance(repeat, RepeatOptions) and (most := sizes.rows[node.axis] * repeat.tries) < (
            wanted := repeat.groups
        ):
            yield Problem(
                "repeat-short",
                f"{node.name} can never keep as many groups as it needs",
                node.place,
                found=f"{sizes.rows[node.axis]} prompts, {repeat.tries} tries: at most {most} of "
                f"{wanted} groups",
                expected=f"at least {wanted} prompts over all tries",
                severity="warning",
                remedy=f"groups={most} or fewer, or more tries or --prompts",
            )


MOST_ROWS = 100_000_000  # rows of an iteration: their keys take gigabytes
MOST_TOKENS = 1 << 40  # tokens of an iteration: their ids, masks and log-probs take tens of terabytes


def too_many_rows(sizes: Sizes) -> Iterator[Problem]:
    """Yield a problem for each sampling call with more rows or tokens than any machine can hold."""
    for node in sizes.graph.nodes:
        if not isinstance(node.settings, GenerateOptions):
            continue
        if (tokens := sizes.rows[node.rows_axis] * node.settings.max_tokens) > MOST_TOKENS:
            yield Problem(
                "too-many-tokens",
                f"{node.name} samples more tokens than memory can hold",
                node.place,
                found=f"up to {tokens} tokens an iteration",
                expected=f"at most {MOST_TOKENS}",
                remedy="fewer max_tokens, fewer samples of each prompt, or fewer --prompts",
            )
        if (rows := sizes.rows[node.rows_axis]) > MOST_ROWS:
            yield Problem(
                "too-many-rows",
                f"{node.name} samples more rows than memory can hold",
                node.place,
                found=f"{rows} rows an iteration, of {sizes.assumed.prompts} prompts",
                expected=f"at most {MOST_ROWS}",
                remedy="fewer samples of each prompt, or fewer --prompts",
            )


def crowded(placement: Placement, cores: int) -> Iterator[Problem]:
    """Yield a warning if there are more workers, each with its own models, than ``cores`` on this machine."""
    ranks = sum(placement.pools.values())
    if ranks > cores:
        yield Problem(
            "crowded",
            f"{ranks} workers share {cores} cores, and each loads its models",
            found=listed(f"{pool}={count}" for pool, count in placement.pools.items()),
            severity="warning",
            expected=f"at most {cores} ranks on this machine",
            remedy="fewer ranks in --pools, or a cluster with --ray-address",
        )


def unused_pools(placement: Placement) -> Iterator[Problem]:
    """Yield a problem for each pool that has neither a trainer nor a generator."""
    used = {*placement.trainers.values(), *placement.generators.values()}
    for pool in placement.pools:
        if used and pool not in used:
            yield Problem(
                "pool-unused",
                f"no role uses pool '{pool}'",
                found=f"roles on {listed(sorted(used))}",
                expected="at least one trainer or generator on each pool",
                severity="warning",
                remedy=f"remove {pool} from --pools, or place a trainer or generator there: "
                f"--ROLE.trainer.pool {pool}",
            )


def idle_ranks(plan: Plan, sizes: Sizes) -> Iterator[Problem]:
    """Yield a problem for each pool with more ranks than its nodes can use.

    The same goes for minibatches with fewer rows than the pool has ranks.
    """
    assert plan.placement is not None
    most: dict[str, tuple[int, str]] = {}
    small: list[Problem] = []
    for node, size, pool in _placed(plan, sizes):
        units = size.groups[node.axis] if node.rows == "group" else size.rows[node.axis]
        most[pool] = max(most.get(pool, (0, "")), (units, "groups" if node.rows == "group" else "rows"))
        if isinstance(node.settings, UpdateOptions) and node.settings.minibatch:
            small += _small(node, node.settings.minibatch, pool, plan.placement.pools[pool])
    for pool, (units, what) in most.items():
        if units < (ranks := plan.placement.pools[pool]):
            yield Problem(
                "idle-ranks",
                f"pool '{pool}' has more ranks than an iteration can fill",
                found=f"{ranks} ranks, but at most {units} {what} at once",
                expected=f"at most {units} ranks",
                severity="warning",
                remedy=f"--pools with {pool}={units}, or more --prompts",
            )
    yield from small


def _placed(plan: Plan, sizes: Sizes) -> Iterator[tuple[Node, Sizes, str]]:
    """Yield (node, sizes of its graph, pool) for each node that spreads rows over a model's pool.

    This includes nodes in repeats.
    """
    assert plan.placement is not None
    for i in plan.live:
        node = plan.graph.nodes[i]
        if plan.placement.pool_of(node) is not None and node.dispatch == "DP_COMPUTE":
            yield node, sizes, plan.home[i]
        if i in plan.bodies:
            yield from _placed(plan.bodies[i], sizes.bodies[i])


def _small(node: Node, minibatch: int, pool: str, ranks: int) -> Iterator[Problem]:
    if minibatch < ranks:
        yield Problem(
            "small-minibatch",
            f"a minibatch of {node.name} has fewer rows than pool '{pool}' has ranks",
            node.place,
            found=f"minibatch={minibatch}, {ranks} ranks",
            expected=f"at least {ranks} rows in a step",
            severity="warning",
            remedy=f"minibatch={ranks} or more, or fewer ranks: {ranks - minibatch} ranks are idle in every "
            "step",
        )


def overlap_problems(graph: Graph, placement: Placement | None, staleness: int) -> Iterator[Problem]:
    """Yield a problem for each role whose trainer and generator share a pool, so it can't sample ahead."""
    ahead = [use.name for use in graph.roles if use.trained and use.generates] if staleness >= 1 else []
    if placement is None and ahead:
        yield Problem(
            "staleness",
            "a run in one process has one pool, so its rollouts are never stale",
            found=f"--staleness {staleness}",
            expected=f"the generator of {listed(ahead)} on one pool and its trainer on another, so that they "
            "can overlap",
            remedy=f"--pools {REST}=1,{GENERATORS}=1, or remove --staleness",
        )
    for role in ahead if placement else ():
        pool = placement.trainers.get(role) if placement else None
        if placement and pool is not None and pool == placement.generators.get(role):
            yield Problem(
                "staleness",
                f"the trainer and the generator of role '{role}' alternate on pool '{pool}', so its "
                "rollouts are never stale",
                found=f"--staleness {staleness}, both sides on '{pool}'",
                expected="two pools, so that they can overlap",
                remedy=_separate_pools(role, pool, placement),
            )


def stream_problems(plan: Plan, staleness: int) -> Iterator[Problem]:
    """Yield the problems with ``--stream``: flows that can't be streamed, and chunks that don't help."""
    chunks = plan.streaming.chunks
    if chunks > 1 and staleness >= 1:
        yield Problem(
            "stream-ahead",
            "rows sampled ahead of training are complete before they are scored, so chunks bring no benefit",
            found=f"--stream {chunks} --staleness {staleness}",
            expected="one of the two",
            remedy="remove --stream",
        )
    elif chunks > 1 and not any(each.pieces for each in (plan, *plan.bodies.values())):
        reasons = "; ".join(
            note.what
            for each in (plan, *plan.bodies.values())
            for note in each.notes
            if note.name == "stream"
        )
        yield Problem(
            "stream-nothing",
            f"nothing in flow '{plan.graph.name}' can be scored before all rows are sampled",
            found=f"--stream {chunks}: {reasons}",
            remedy="remove --stream",
            expected="a reward function, or a model on another pool with a backend whose rounding does not "
            "depend on other rows",
        )


def _separate_pools(role: str, pool: str, placement: Placement) -> str:
    other = next((name for name in placement.pools if name != pool), None)
    if other is not None:
        return f"--{role}.generator.pool {other}"
    ranks = placement.pools[pool]
    return (
        f"--pools {REST}={max(ranks // 2, 1)},{GENERATORS}={max(ranks - ranks // 2, 1)}, or remove "
        "--staleness"
    )
