"""The account of a run in words and as metrics: how many rows were sampled, and what became of them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rlflow.author.figures import Figure, Of
from rlflow.checkpoints.logs import Growing, objects
from rlflow.execution.account import Account, Count, End, Fate

FILE = "fates.jsonl"


def run_account(folder: Path) -> Account:
    """The account of all iterations of a run, from its folder; an empty one where there is none."""
    total = Account()
    for values in objects(Growing(folder / FILE).lines()):
        with contextlib.suppress(ValueError):  # an object that is no account
            total.add(Account.from_json(values))
    return total


def fate_metrics(account: Account) -> dict[Figure, float]:
    """The rows of an iteration by fate, each where any row has it. Prompts without tokens count in none."""
    rows = {fate: sum(count.rows for _, end, count in _sampled(account) if end.fate is fate) for fate in Fate}
    return {Figure(Of.FATE, fate): float(count) for fate, count in rows.items() if count}


def fates_text(account: Account) -> str:
    """Lines that say of each sampling node how many rows and tokens it gave, and how they ended."""
    ends = _sampled(account)
    lines = []
    for source in dict.fromkeys(source for source, _, _ in ends):
        count = account.placed.get(source, account.sampled.get(source, Count()))
        lines.append(f"{source}: {_amount(count)}{' in the place of sampled ones' * (source in account.placed)}")
        lines += [f"  {end_text(end)}: {_amount(part)}" for name, end, part in ends if name == source]
    return "\n".join(lines)


def _amount(count: Count) -> str:
    """Rows with their tokens, or tokens of rows that are counted elsewhere."""
    return f"{count.rows} rows of {count.tokens} tokens" if count.rows else f"{count.tokens} tokens"


def end_text(end: End) -> str:
    """A fate in words, with its node, the cause and the setting that decided it."""
    where = f" {'by' if end.fate is Fate.TRAINED else 'at'} {end.node}" if end.node else ""
    setting = f" ({end.setting})" if end.setting else ""
    return f"{end.fate}{where}{setting}{f': {end.cause}' if end.cause else ''}"


def _sampled(account: Account) -> list[tuple[str, End, Count]]:
    """The ends of rows that have tokens, by node."""
    return [(source, end, count) for (source, end), count in sorted(account.ends.items()) if account.sampled.get(source, count).tokens]
