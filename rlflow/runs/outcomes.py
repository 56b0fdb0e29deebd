"""The funnel of rows, as metrics: how many sampled rows are left after each step on the way to an update.

    funnel/rows_sampled      rows sampled for training, including carry-over from earlier iterations
    funnel/rows_kept         sampled rows that a `repeat` or `choose` kept, if any were dropped
    funnel/rows_scored       rows with a score
    funnel/rows_mixed        scored rows in groups whose scores differ, if there are groups
    funnel/rows_untruncated  rows counted in rows_mixed (or rows_scored) that ended before max_tokens
    funnel/rows_used         rows that an update used

rows_sampled, rows_kept and rows_used come from the row accounting, and the other three are measured along
with the iteration's health metrics. A flow that doesn't sample has only rows_used. If several trained roles
sample, each has its own funnel. `rlflow/training/learning.py` counts the tokens in an update that have a
gradient.

This module also turns the row accounting into text and metrics, and computes pass@k from several answers to a
prompt.
"""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlflow.author.figures import Figure, Of
from rlflow.checkpoints.logs import Growing, objects
from rlflow.compiler.graph.model import Graph, Node, Op, all_nodes
from rlflow.execution.account import Count, End, RowAccount, RowOutcome
from rlflow.execution.row_ledger import sampler_of

# steps of the funnel that are measured with the health metrics of the iteration
MEASURED = ("scored", "mixed", "untruncated")
# causes for which rows are dropped before they are scored
BEFORE = ("not chosen", "not kept")


def step(name: str, role: str = "") -> Figure:
    """Return the metric for the funnel's step ``name``. Give a ``role`` only if several trained roles sample."""
    return Figure(Of.ROWS, f"funnel/rows_{name}", role=role)


def funnel_metrics(
    account: RowAccount, graph: Graph, health: Mapping[Figure, float], roles: Collection[str] = ()
) -> dict[Figure, float]:
    """Return an iteration's funnel as metrics, from its row accounting and its health metrics.

    ``roles``: the trained roles that sample, if there are several; each then has its own funnel.
    """
    nodes = {node.name: node for node in all_nodes(graph.nodes)}
    funnel: dict[Figure, float] = {}
    for role in roles or ("",):
        rows = _of_account(account, nodes, role)
        between = {
            name: health[step(name, role)]
            for name in MEASURED
            if step(name, role) in health and "sampled" in rows
        }
        used = {"used": rows.pop("used")} if "used" in rows else {}
        funnel |= {step(name, role): value for name, value in (rows | between | used).items()}
    return funnel


def without_funnel(health: Mapping[Figure, float]) -> dict[Figure, float]:
    """Return the health metrics that aren't part of the funnel."""
    steps = {step(name).name for name in MEASURED}
    return {
        figure: value
        for figure, value in health.items()
        if figure.of is not Of.ROWS or figure.name not in steps
    }


def _of_account(account: RowAccount, nodes: Mapping[str, Node], role: str) -> dict[str, float]:
    """Return the steps that the row accounting knows: how many rows were sampled, kept and used.

    Rows encoded from text count as well if an update trained on them together with sampled rows. ``role``:
    count only this role's rows, or those of all roles if it is "".
    """
    sources = [
        source
        for source in {*account.sampled, *account.opened}
        if _learned(account, source) and _samples(nodes[source], role)
    ]
    trained = {
        (source, end): count
        for (source, end), count in account.ends.items()
        if end.fate is RowOutcome.TRAINED and role in ("", nodes[end.node].role)
    }
    together = {end.node for source, end in trained if source in sources}
    encoded = {
        source
        for source, end in trained
        if sources and nodes[source].op is Op.ENCODE and end.node in together
    }
    used = sum(
        count.rows
        for (source, _), count in trained.items()
        # encoded and drawn rows were not sampled in this iteration
        if not sources or source in encoded or nodes[source].op not in (Op.ENCODE, Op.DRAW)
    )
    if not sources:
        return {"used": float(used)} if used else {}
    sampled = sum(account.placed[source].rows for source in encoded) + sum(
        which.get(source, Count()).rows for source in sources for which in (account.sampled, account.opened)
    )
    dropped = sum(
        count.rows
        for (source, end), count in account.ends.items()
        if source in sources and _before_scores(end.fate, end.cause)
    )
    return (
        {"sampled": float(sampled)}
        | ({"kept": float(sampled - dropped)} if dropped else {})
        | {"used": float(used)}
    )


def _samples(node: Node, role: str) -> bool:
    """Return whether a node samples, and does so with the model of ``role`` if one is given."""
    samplers = sampler_of(node)
    return node.op in (Op.GENERATE, Op.REPEAT) and (role in samplers if role else bool(samplers))


def _learned(account: RowAccount, source: str) -> bool:
    """Return whether some of a node's rows are learned from and not just read, as a baseline's rows are."""
    return any(end.fate is not RowOutcome.READ for (name, end), _ in account.ends.items() if name == source)


def _before_scores(fate: RowOutcome, cause: str) -> bool:
    return fate in (RowOutcome.SURPLUS, RowOutcome.STALE, RowOutcome.CARRIED) or (
        fate is RowOutcome.LEFT_OUT and cause in BEFORE
    )


FILE = "fates.jsonl"


def run_account(folder: Path) -> RowAccount:
    """Return the row accounting of all of a run's iterations, from its folder.

    It is empty if the file doesn't exist.
    """
    total = RowAccount()
    for values in objects(Growing(folder / FILE).lines()):
        with contextlib.suppress(ValueError):  # skip an object that is not a row accounting
            total.add(RowAccount.from_json(values))
    return total


def outcome_metrics(account: RowAccount) -> dict[Figure, float]:
    """Return how many rows of an iteration ended in each way, as metrics.

    Outcomes that didn't occur are left out, and prompts without tokens aren't counted.
    """
    rows = {
        fate: sum(count.rows for _, end, count in _sampled(account) if end.fate is fate)
        for fate in RowOutcome
    }
    return {Figure(Of.ROW_OUTCOME, fate): float(count) for fate, count in rows.items() if count}


def outcomes_text(account: RowAccount) -> str:
    """Return lines of text with the rows and tokens of each sampling node, and what became of them."""
    ends = _sampled(account)
    lines = []
    for source in dict.fromkeys(source for source, _, _ in ends):
        kinds = (
            (account.placed, " that no model sampled"),
            (account.stored, " stored"),
            (account.sampled, ""),
        )
        counts, what = next(
            ((counts, what) for counts, what in kinds if source in counts),
            (account.opened, " of earlier ones"),
        )
        lines.append(f"{source}: {_amount(counts.get(source, Count()))}{what}")
        lines += [f"  {end_text(end)}: {_amount(part)}" for name, end, part in ends if name == source]
    return "\n".join(lines)


def _amount(count: Count) -> str:
    """Return the number of rows and tokens as text, or only the tokens if the rows are counted elsewhere."""
    return f"{count.rows} rows, {count.tokens} tokens" if count.rows else f"{count.tokens} tokens"


def end_text(end: End) -> str:
    """Describe an outcome, including its node, its cause and the setting that led to it."""
    where = f" {'by' if end.fate is RowOutcome.TRAINED else 'at'} {end.node}" if end.node else ""
    setting = f" ({end.setting})" if end.setting else ""
    return f"{end.fate}{where}{setting}{f': {end.cause}' if end.cause else ''}"


def _sampled(account: RowAccount) -> list[tuple[str, End, Count]]:
    """Return (node, outcome, count) for all rows that have tokens."""
    return [
        (source, end, count)
        for (source, end), count in sorted(account.ends.items())
        if account.sampled.get(source, count).tokens
    ]


@dataclass(frozen=True)
class Answers:
    """The answers to one prompt, in the order in which they were sampled."""

    scores: Sequence[float]  # NaN where the score is missing
    extracted: Sequence[str | None]  # extracted answers, or None

    @property
    def right(self) -> list[bool]:
        """Whether each answer scores 1.0."""
        return [score == 1.0 for score in self.scores]


def repeated_figures(prompts: Sequence[Answers]) -> dict[str, float]:
    """Return mean@n, pass@k and maj@k for prompts with n answers each.

    k is each power of two up to n, starting from 1 for pass@k and from 2 for maj@k. mean@n is the mean of all
    scores that aren't missing, and is left out if all are. maj@k is left out if no answer could be extracted.
    """
    count = len(prompts[0].scores)
    scores = [score for answers in prompts for score in answers.scores if not math.isnan(score)]
    figures = {f"mean@{count}": sum(scores) / len(scores)} if scores else {}
    sizes = powers_of_two(count)
    figures |= {
        f"pass@{k}": _mean([pass_at(count, sum(answers.right), k) for answers in prompts]) for k in sizes
    }
    if any(extracted is not None for answers in prompts for extracted in answers.extracted):
        figures |= {
            f"maj@{k}": _mean([majority_at(answers, k) for answers in prompts]) for k in sizes if k > 1
        }
    return figures


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def powers_of_two(most: int) -> list[int]:
    """Return 1, 2, 4 and so on, up to ``most``."""
    return [2**exponent for exponent in range(most.bit_length())]


def pass_at(samples: int, right: int, k: int) -> float:
    """Return the probability that at least one of k answers is right.

    The k answers are drawn without replacement from ``samples`` answers, ``right`` of which are right. This
    is the unbiased estimate in Chen et al., "Evaluating Large Language Models Trained on Code", 2021,
    equation 1.
    """
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_at(answers: Answers, k: int) -> float:
    """Return maj@k: the probability that a majority vote among k answers is right.

    The answers are split into consecutive sets of k, and the result is the mean over these sets, which makes
    the estimate unbiased. Leftover answers aren't used.
    """
    right = answers.right
    lots = [range(start, start + k) for start in range(0, len(right) - k + 1, k)]
    return _mean(
        [
            majority([answers.extracted[place] for place in lot], [right[place] for place in lot])
            for lot in lots
        ]
    )


def majority(extracted: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return the probability that a majority vote is right.

    ``extracted``: the answer that each vote is for, or None. ``right``: whether each answer is right. Ties
    are broken at random. If equal answers have different scores, the share that is right counts. Returns 0 if
    no answer was extracted.
    """
    voters: dict[str, list[bool]] = defaultdict(list)
    for answer, hit in zip(extracted, right, strict=True):
        if answer is not None:
            voters[answer].append(hit)
    most = max(map(len, voters.values()), default=0)
    return _mean([sum(hits) / len(hits) for hits in voters.values() if len(hits) == most] or [0.0])
