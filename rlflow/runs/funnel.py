"""The funnel of rows: how many of those sampled are left to learn from, step by step, as metrics of an iteration.

    funnel/rows_sampled      by nodes that sample and whose rows are not read only, with what earlier iterations had left
    funnel/rows_kept         of them, after a `repeat` or a `choose`, where these left any out
    funnel/rows_scored       rows with a score
    funnel/rows_mixed        of the scored those in groups whose scores differ, where there are groups
    funnel/rows_untruncated  of these those that ended before max_tokens
    funnel/rows_used         rows that an update was made of

Sampled, kept and used are the account's; the three between are attributes of rows, measured with the health of the iteration. A flow that
samples nothing has used rows alone. Where several trained roles sample, names begin with the role's. How many tokens of an update have a
gradient is counted where the loss is computed (`rlflow/training/signal.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from rlflow.execution.account import Account, Count, Fate

HEAD = "funnel/rows_"
BEFORE = ("not chosen", "not kept")  # causes for which rows are left out before anything else is asked of them


def funnel_metrics(account: Account, health: Mapping[str, float]) -> dict[str, float]:
    """The funnel of rows of an iteration, from its account and its health metrics, whose own part of it is included."""
    roles = dict.fromkeys(name.partition(HEAD)[0] for name in health if HEAD in name) or {"": None}
    funnel: dict[str, float] = {}
    for role in roles:
        funnel |= {f"{role}{name}": value for name, value in _of_role(account, role.rstrip("/"), health).items()}
    return funnel


def without_funnel(health: Mapping[str, float]) -> dict[str, float]:
    """Health metrics apart from those of the funnel."""
    return {name: value for name, value in health.items() if HEAD not in name}


def _of_role(account: Account, role: str, health: Mapping[str, float]) -> dict[str, float]:
    sources = [source for source in {*account.sampled, *account.opened} if _learned(account, source, role)]
    used = sum(count.rows for (_, end), count in account.ends.items() if end.fate is Fate.TRAINED and end.node.startswith(role))
    if not sources:
        return {f"{HEAD}used": float(used)} if used else {}
    sampled = sum(which.get(source, Count()).rows for source in sources for which in (account.sampled, account.opened))
    dropped = sum(count.rows for (source, end), count in account.ends.items() if source in sources and _before_scores(end.fate, end.cause))
    rows = {"sampled": float(sampled)} | ({"kept": float(sampled - dropped)} if dropped else {})
    prefix = f"{role}/{HEAD}" if role else HEAD
    rows |= {name.removeprefix(prefix): value for name, value in health.items() if name.startswith(prefix)}
    return {f"{HEAD}{name}": value for name, value in (rows | {"used": float(used)}).items()}


def _learned(account: Account, source: str, role: str) -> bool:
    """Whether a node samples rows for more than to be read: not the baseline of another sampling."""
    samples = ".generate" in source and source.startswith(role)
    return samples and any(end.fate is not Fate.READ for (name, end), _ in account.ends.items() if name == source)


def _before_scores(fate: Fate, cause: str) -> bool:
    return fate in (Fate.SURPLUS, Fate.STALE, Fate.CARRIED) or (fate is Fate.LEFT_OUT and cause in BEFORE)
