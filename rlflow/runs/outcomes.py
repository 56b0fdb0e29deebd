"""The funnel of rows: how many of those sampled are left to learn from, step by step, as metrics of an
iteration.

    funnel/rows_sampled      by nodes that sample and whose rows are not read only, with what earlier iterations had left
    funnel/rows_kept         of them, after a `repeat` or a `choose`, where these left any out
    funnel/rows_scored       rows with a score
    funnel/rows_mixed        of the scored those in groups whose scores differ, where there are groups
    funnel/rows_untruncated  of these those that ended before max_tokens
    funnel/rows_used         rows that an update was made of

Sampled, kept and used are the account's; the three between are attributes of rows, measured with the health
of the iteration. A flow that samples nothing has used rows alone. Where several trained roles sample, each
has a funnel of its own. How many tokens of an update have a gradient is counted where the loss is computed
(`rlflow/training/learning.py`).

Here too: the account of rows in words and as metrics, and pass@k of several answers to a prompt.
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
from rlflow.compiler.graph.model import Graph, Node, Op
from rlflow.compiler.trace.compile import all_nodes
from rlflow.execution.account import Account, Count, End, Fate, sampler_of

# steps of rows that are measured with the health of the iteration
MEASURED = ("scored", "mixed", "untruncated")
# causes for which rows are left out before anything else is asked of them
BEFORE = ("not chosen", "not kept")


def step(name: str, role: str = "") -> Figure:
    """A step of the funnel, of one role if several trained roles sample."""
    return Figure(Of.ROWS, f"funnel/rows_{name}", role=role)


def funnel_metrics(
    account: Account, graph: Graph, health: Mapping[Figure, float], roles: Collection[str] = ()
) -> dict[Figure, float]:
    """The funnel of rows of an iteration, from its account and its health metrics. ``roles``: those with a
    funnel of their own, if several trained roles sample."""
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
    """Health metrics apart from those of the funnel."""
    steps = {step(name).name for name in MEASURED}
    return {
        figure: value
        for figure, value in health.items()
        if figure.of is not Of.ROWS or figure.name not in steps
    }


def _of_account(account: Account, nodes: Mapping[str, Node], role: str) -> dict[str, float]:
    """Steps that the account knows: how many rows a role, or any, sampled to be learned from, kept and
    used."""
    sources = [
        source
        for source in {*account.sampled, *account.opened}
        if _learned(account, source) and _samples(nodes[source], role)
    ]
    used = sum(
        count.rows
        for (_, end), count in account.ends.items()
        if end.fate is Fate.TRAINED and role in ("", nodes[end.node].role)
    )
    if not sources:
        return {"used": float(used)} if used else {}
    sampled = sum(
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
    """Whether a node samples, with the model of the role if one is named."""
    samplers = sampler_of(node)
    return node.op in (Op.GENERATE, Op.REPEAT) and (role in samplers if role else bool(samplers))


def _learned(account: Account, source: str) -> bool:
    """Whether rows of a node are there for more than to be read: not those of the baseline of another
    sampling."""
    return any(end.fate is not Fate.READ for (name, end), _ in account.ends.items() if name == source)


def _before_scores(fate: Fate, cause: str) -> bool:
    return fate in (Fate.SURPLUS, Fate.STALE, Fate.CARRIED) or (fate is Fate.LEFT_OUT and cause in BEFORE)


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
        lines.append(
            f"{source}: {_amount(count)}{' in the place of sampled ones' * (source in account.placed)}"
        )
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
    return [
        (source, end, count)
        for (source, end), count in sorted(account.ends.items())
        if account.sampled.get(source, count).tokens
    ]


@dataclass(frozen=True)
class Answers:
    """The sampled answers to one prompt, in the order in which they were drawn."""

    scores: Sequence[float]  # NaN where the score is missing
    extracted: Sequence[str | None]  # what is voted with; None for an answer that has no vote

    @property
    def right(self) -> list[bool]:
        """Whether each passes: whether its score is 1.0."""
        return [score == 1.0 for score in self.scores]


def repeated_figures(prompts: Sequence[Answers]) -> dict[str, float]:
    """mean@n, pass@k for powers of two up to n, and maj@k for those from 2 on, of prompts with n answers
    each. mean@n is the mean of the scores, without missing ones; it is left out where all are missing, and
    maj@k where no answer has a vote."""
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
    """1, 2, 4 and so on, up to ``most``."""
    return [2**exponent for exponent in range(most.bit_length())]


def pass_at(samples: int, right: int, k: int) -> float:
    """The chance that one of k answers is right, drawn without replacement from ``samples`` of which
    ``right`` are: the unbiased estimate of Chen et al., "Evaluating Large Language Models Trained on Code",
    2021, equation 1."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_at(answers: Answers, k: int) -> float:
    """The share of lots of k answers whose most frequent one is right. Lots are taken in the order of the
    draws and share no answer, so that the estimate is unbiased; answers that fill no lot are left out."""
    right = answers.right
    lots = [range(start, start + k) for start in range(0, len(right) - k + 1, k)]
    return _mean(
        [
            majority([answers.extracted[place] for place in lot], [right[place] for place in lot])
            for lot in lots
        ]
    )


def majority(extracted: Sequence[str | None], right: Sequence[bool]) -> float:
    """The chance that a vote is right. Equal answers vote together; of several with most votes each wins as
    often; 0 where none votes. An answer that was judged both ways counts by its voters."""
    voters: dict[str, list[bool]] = defaultdict(list)
    for answer, hit in zip(extracted, right, strict=True):
        if answer is not None:
            voters[answer].append(hit)
    most = max(map(len, voters.values()), default=0)
    return _mean([sum(hits) / len(hits) for hits in voters.values() if len(hits) == most] or [0.0])
