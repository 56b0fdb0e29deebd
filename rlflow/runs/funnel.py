"""The funnel of rows: how many of those sampled are left to learn from, step by step, as metrics of an iteration.

    funnel/rows_sampled      by nodes that sample and whose rows are not read only, with what earlier iterations had left
    funnel/rows_kept         of them, after a `repeat` or a `choose`, where these left any out
    funnel/rows_scored       rows with a score
    funnel/rows_mixed        of the scored those in groups whose scores differ, where there are groups
    funnel/rows_untruncated  of these those that ended before max_tokens
    funnel/rows_used         rows that an update was made of

Sampled, kept and used are the account's; the three between are attributes of rows, measured with the health of the iteration. A flow that
samples nothing has used rows alone. Where several trained roles sample, each has a funnel of its own. How many tokens of an update have a
gradient is counted where the loss is computed (`rlflow/training/signal.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlflow.author.figures import Figure, Of
from rlflow.compiler.graph.model import Graph, Node, Op
from rlflow.compiler.trace.compile import all_nodes
from rlflow.execution.account import Account, Count, Fate, sampler_of

MEASURED = ("scored", "mixed", "untruncated")  # steps of rows that are measured with the health of the iteration
BEFORE = ("not chosen", "not kept")  # causes for which rows are left out before anything else is asked of them


def step(name: str, role: str = "") -> Figure:
    """A step of the funnel, of one role if several trained roles sample."""
    return Figure(Of.ROWS, f"funnel/rows_{name}", role=role)


def funnel_metrics(account: Account, graph: Graph, health: Mapping[Figure, float], roles: Collection[str] = ()) -> dict[Figure, float]:
    """The funnel of rows of an iteration, from its account and its health metrics. ``roles``: those with a funnel of their own, if several
    trained roles sample."""
    nodes = {node.name: node for node in all_nodes(graph.nodes)}
    funnel: dict[Figure, float] = {}
    for role in roles or ("",):
        rows = _of_account(account, nodes, role)
        between = {name: health[step(name, role)] for name in MEASURED if step(name, role) in health and "sampled" in rows}
        used = {"used": rows.pop("used")} if "used" in rows else {}
        funnel |= {step(name, role): value for name, value in (rows | between | used).items()}
    return funnel


def without_funnel(health: Mapping[Figure, float]) -> dict[Figure, float]:
    """Health metrics apart from those of the funnel."""
    steps = {step(name).name for name in MEASURED}
    return {figure: value for figure, value in health.items() if figure.of is not Of.ROWS or figure.name not in steps}


def _of_account(account: Account, nodes: Mapping[str, Node], role: str) -> dict[str, float]:
    """Steps that the account knows: how many rows a role, or any, sampled to be learned from, kept and used."""
    sources = [source for source in {*account.sampled, *account.opened} if _learned(account, source) and _samples(nodes[source], role)]
    used = sum(count.rows for (_, end), count in account.ends.items()
               if end.fate is Fate.TRAINED and role in ("", nodes[end.node].role))
    if not sources:
        return {"used": float(used)} if used else {}
    sampled = sum(which.get(source, Count()).rows for source in sources for which in (account.sampled, account.opened))
    dropped = sum(count.rows for (source, end), count in account.ends.items() if source in sources and _before_scores(end.fate, end.cause))
    return {"sampled": float(sampled)} | ({"kept": float(sampled - dropped)} if dropped else {}) | {"used": float(used)}


def _samples(node: Node, role: str) -> bool:
    """Whether a node samples, with the model of the role if one is named."""
    samplers = sampler_of(node)
    return node.op in (Op.GENERATE, Op.REPEAT) and (role in samplers if role else bool(samplers))


def _learned(account: Account, source: str) -> bool:
    """Whether rows of a node are there for more than to be read: not those of the baseline of another sampling."""
    return any(end.fate is not Fate.READ for (name, end), _ in account.ends.items() if name == source)


def _before_scores(fate: Fate, cause: str) -> bool:
    return fate in (Fate.SURPLUS, Fate.STALE, Fate.CARRIED) or (fate is Fate.LEFT_OUT and cause in BEFORE)
