"""A claim about the run's own rewards, the only one for which they are asked: that a row's score is its
own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from rlflow.author.figures import Cause
from rlflow.errors import Place
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.proof.rehearsal import JudgedRows, Rehearsals, Scoring

CLOSE = 1e-3  # of two scores of one row, over the spread of all scores: models that judge padded rows round


def reward_claims(
    stage: Rehearsals, reasons: Callable[[], Mapping[Cause, str]], scoring: Scoring | None
) -> Iterator[Claim]:
    """A claim for each call of a reward in a rehearsal with these scores. Rewards are asked three times.
    ``reasons``: gives the first message of each cause for which scores are missing."""
    for rows in stage.rehearse(scoring, asks=True).judged:
        call = stage.plan.graph.by_name.get(rows.node)
        yield of_rows(rows, call.place if call else None, reasons())


def of_rows(
    rows: JudgedRows, place: Place | None = None, reasons: Mapping[Cause, str] | None = None
) -> Claim:
    """Whether rows are paid the same beside others: a function that scores several rows in one call may give
    them back in another order."""
    count, known = len(rows.once), rows.once[~rows.once.isnan()]
    causes = "".join(f"; {cause}: {' '.join(message.split())}" for cause, message in (reasons or {}).items())
    missing = f"; {count - len(known)} have no score{causes}" if len(known) < count else ""
    if count and not len(known):
        return Claim(
            "reward-rows", rows.node, "falsified", "it gives no row a score", f"{count} rows{causes}", place
        )
    spread = float(known.max() - known.min()) if len(known) else 0.0
    if others := differing(rows.once, rows.again, CLOSE * spread):
        return Claim(
            "reward-rows",
            rows.node,
            "unproved",
            "it judges the same rows otherwise when it is asked again",
            f"{others} of {count} rows{missing}",
        )
    if not spread:
        return Claim(
            "reward-rows",
            rows.node,
            "unproved",
            "it pays all rows of the rehearsal the same",
            f"{count} rows{missing}",
        )
    others = differing(rows.once, rows.shuffled, CLOSE * spread)
    return judged(
        "reward-rows",
        rows.node,
        not others,
        (
            "what a row is paid does not depend on the rows that are judged beside it",
            "what a row is paid depends on the rows that are judged beside it, or it gets the score of "
            "another",
        ),
        f"{others} of {count} rows have another score where the same rows are judged in another "
        f"order{missing}",
        place,
    )


def differing(one: Tensor, other: Tensor, close: float) -> int:
    """How many scores differ by more than ``close``; two that are missing are equal."""
    return int((~((one - other).abs() <= close) & ~(one.isnan() & other.isnan())).sum())
