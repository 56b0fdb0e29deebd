"""The claim that a row's score depends only on that row.

This is the only claim that is checked by calling the run's own rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from rlflow.author.figures import Cause
from rlflow.errors import Place, Reason
from rlflow.runs.proof.claims import Claim, judged
from rlflow.runs.proof.dry_run import DryRuns, RepeatedScores, Scoring

CLOSE = 1e-3  # tolerance of a score, relative to the spread of all scores: reward models round padded rows


def reward_claims(
    stage: DryRuns, reasons: Callable[[], Mapping[Cause, Reason]], scoring: Scoring | None
) -> Iterator[Claim]:
    """Yield a claim for each reward call in a dry run. Each call is made three times.

    ``scoring``: gives the scores for the dry run's updates; if it is None, the rewards do. ``reasons``:
    returns the first reason for each cause of missing scores.
    """
    for rows in stage.dry_run_once(scoring, asks=True).judged:
        call = stage.plan.graph.by_name.get(rows.node)
        yield of_rows(rows, call.place if call else None, reasons())


def of_rows(
    rows: RepeatedScores, place: Place | None = None, reasons: Mapping[Cause, Reason] | None = None
) -> Claim:
    """Return the claim that the scores in ``rows`` stay the same when the rows are shuffled.

    It is falsified, for example, if a reward function scores several rows in one call and returns the scores
    in the wrong order. ``reasons``: the first reason for each cause of missing scores.
    """
    count, known = len(rows.once), rows.once[~rows.once.isnan()]
    causes = "".join(f"; {cause}: {' '.join(str(why).split())}" for cause, why in (reasons or {}).items())
    missing = f"; {count - len(known)} have no score{causes}" if len(known) < count else ""
    if count and not len(known):
        return Claim(
            "reward-rows", rows.node, "falsified", "it scores no row", f"{count} rows{causes}", place
        )
    spread = float(known.max() - known.min()) if len(known) else 0.0
    if others := differing(rows.once, rows.again, CLOSE * spread):
        return Claim(
            "reward-rows",
            rows.node,
            "unproved",
            "it gives the same rows different scores in a second call",
            f"{others} of {count} rows{missing}",
        )
    if not spread:
        return Claim(
            "reward-rows",
            rows.node,
            "unproved",
            "it gives all rows of the dry run the same score",
            f"{count} rows{missing}",
        )
    others = differing(rows.once, rows.shuffled, CLOSE * spread)
    return judged(
        "reward-rows",
        rows.node,
        not others,
        (
            "the score of a row does not change with the other rows in the call",
            (
                "the score of a row changes with the other rows in the call, or the scores are returned in the "
                "wrong order"
            ),
        ),
        f"{others} of {count} rows get a different score if the same rows are shuffled{missing}",
        place,
    )


def differing(one: Tensor, other: Tensor, close: float) -> int:
    """Return how many scores differ by more than ``close`` between two calls. Missing scores (NaN) are equal."""
    return int((~((one - other).abs() <= close) & ~(one.isnan() & other.isnan())).sum())
