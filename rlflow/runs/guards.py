"""Checks that warn the user or stop the run.

They find missing rewards, numbers that aren't finite, and samplers that disagree with trainers. This module
also removes records that a model can't handle from the data.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rlflow.author.batch import Batch
from rlflow.author.figures import Cause, Figure, Of
from rlflow.author.node_options import RepeatOptions
from rlflow.compiler.graph.model import Graph
from rlflow.compiler.plan import Plan
from rlflow.config.options import Options
from rlflow.config.roles.bound import Roles, has_weight_check
from rlflow.config.roles.opened_data import split_records
from rlflow.config.roles.prompt_room import room
from rlflow.data.dataset import Dataset
from rlflow.data.faults import Fault, refused, spoken
from rlflow.data.mixed import prompts_of
from rlflow.data.pairs import check_pairs, equal_pairs, told
from rlflow.data.prompts import Prompts
from rlflow.errors import Reason, RemoteFailure, StageError, listed
from rlflow.execution.engine import Engine
from rlflow.execution.summary import IterationSummary
from rlflow.training.metrics import MERGE_ROUNDING


class Guard:
    """Decides after each iteration whether the run has to stop.

    ``reasons``: returns the first reason for each cause of missing rewards.
    """

    def __init__(self, options: Options, reasons: Callable[[], Mapping[Cause, Reason]]) -> None:
        self.options, self.reasons = options, reasons
        self.bad = 0  # number of iterations in a row in which some update took no step
        self._merged: set[str] = set()  # updates with a warning about merged adapters
        self._known: set[Cause] = set()  # causes of missing rewards that were reported

    def check(self, iteration: int, figures: Mapping[Figure, float], summary: IterationSummary) -> None:
        """Raise StageError if the run has to stop after this iteration.

        It does if too many rewards are missing (``--max-missing``), or if an update hasn't taken an optimizer
        step for too many iterations in a row (``--max-bad``). Updates that got no rows don't count.
        """
        self._missing(iteration, figures, summary)
        stuck = [
            figure.node
            for figure, value in figures.items()
            if figure.of is Of.UPDATE and figure.name == "steps" and value == 0 and _had_rows(figure, figures)
        ]
        self.bad = self.bad + 1 if stuck else 0
        if self.options.max_bad and self.bad >= self.options.max_bad:
            rows = summary.broken
            raise StageError(
                stuck[0],
                iteration,
                len(rows),
                f"no finite optimizer step for {self.bad} iterations in a row (--max-bad). Rows with numbers "
                f"that are not finite, as position.sample: {listed(rows) if rows else _of_gradient(*summary.largest)}",
            )

    def missing_warnings(self, figures: Mapping[Figure, float]) -> Iterator[str]:
        """Yield a warning for each new cause of missing rewards, with its first message."""
        counts: Counter[Cause] = Counter()
        for figure, count in figures.items():
            counts[Cause(figure.name, figure.part)] += int(count) if figure.of is Of.MISSING else 0
        causes = [cause for cause, count in counts.items() if count and cause not in self._known]
        if not causes or _rate(figures) > self.options.max_missing:  # the error that ends the run names them
            return
        reasons = self.reasons()
        for cause in causes:
            self._known.add(cause)
            message = " ".join(str(reasons.get(cause, "")).split())[:LONGEST]
            traceback = "; rewards.txt has the full traceback" if cause.name == RAISED else ""
            yield (
                f"{counts[cause]} rewards are missing, and their rows are skipped: {cause}: {message} (later "
                f"ones are only counted, in the metrics reward/missing_*{traceback})"
            )

    def merge_warnings(self, figures: Mapping[Figure, float]) -> Iterator[str]:
        """Yield a warning if merging an adapter into its model loses more than half of what was learned.

        There is at most one warning per update.
        """
        for figure, share in figures.items():
            if (
                figure.of is Of.UPDATE
                and figure.name == MERGE_ROUNDING
                and share > HALF
                and figure.node not in self._merged
            ):
                self._merged.add(figure.node)
                yield (
                    f"{figure.node}: rows are sampled with adapters merged into weights of fewer bits. The "
                    f"rounding is {share:.0%} of the change that the adapters have learned; the share falls as "
                    "they learn more. --dtype float32 or a larger --lr is more exact. final/ has the merged "
                    "weights in float32, and the adapters (this is reported once; the metric continues)"
                )

    def _missing(self, iteration: int, figures: Mapping[Figure, float], summary: IterationSummary) -> None:
        rate = _rate(figures)
        if rate <= self.options.max_missing:
            return
        reasons = self.reasons()
        causes = "; ".join(f"{cause}: {reason}" for cause, reason in reasons.items())
        traceback = (
            ". The full traceback is in rewards.txt in the run's folder"
            if any(cause.name == RAISED for cause in reasons)
            else ""
        )
        error = StageError(
            "reward",
            iteration,
            summary.scored,
            f"{rate:.0%} of the rewards are missing, expected at most "
            f"{self.options.max_missing:.0%} (--max-missing). {causes or 'the scores are NaN'}{traceback}",
        )
        for reason in reasons.values():
            if isinstance(reason, RemoteFailure):
                reason.add_notes_to(error)
        raise error


def _of_gradient(column: str, largest: float) -> str:
    """Explain why no optimizer step is finite although all rows are.

    ``column``: the column with the largest absolute value. ``largest``: that value.
    """
    if largest <= OVERFLOWS:
        return "none; the gradient is not finite"
    return (
        f"none; the gradient is too large for float32, because '{column}' has numbers of {largest:.3g}, "
        "which losses square. Scale them down at their source, for example in the reward"
    )


def loss_warnings(figures: Mapping[Figure, float]) -> Iterator[str]:
    """Yield a warning for each update whose loss isn't finite although its gradient is."""
    for figure, value in figures.items():
        if figure.of is Of.UPDATE and figure.name == "loss" and not math.isfinite(value):
            yield (
                f"{figure.node}: the loss is {value}, so its metric is null. Its gradient is finite, and the "
                "optimizer steps were taken; a term without a gradient is NaN or too large for float32"
            )


def _had_rows(steps: Figure, figures: Mapping[Figure, float]) -> bool:
    """Return True unless the update with the metric ``steps`` got no rows at all."""
    counts = [figures.get(steps._replace(name=name)) for name in ("rows", "left_out")]
    return None in counts or any(counts)


def _rate(figures: Mapping[Figure, float]) -> float:
    """Return the highest share of missing rewards among all reward roles."""
    return max(
        (
            value
            for figure, value in figures.items()
            if figure.of is Of.SCORES and figure.name == "missing_rate"
        ),
        default=0.0,
    )


HALF = 0.5  # share of the change that adapters have learned
OVERFLOWS = 1e18  # the squares of larger numbers overflow float32
# the cause of missing rewards if the user's function raised; it prints the traceback
RAISED = "raised"
LONGEST = 300  # maximum number of characters in a reward's message in a warning


def mismatch_warnings(options: Options, figures: Mapping[Figure, float], role: str = "") -> Iterator[str]:
    """Yield a warning for each role whose sampler and trainer disagree about log-probs.

    ``role``: which role to name for metrics without one. There are no warnings with ``--staleness``, where
    samples come from older weights, or for the null backend, which has no weights.
    """
    if options.staleness or options.backend == "null":
        return
    for figure, factor in figures.items():
        if figure.of is Of.ROWS and figure.name == "policy/mismatch_factor" and factor > options.max_mismatch:
            of = f" of {figure.role or role}" if figure.role or role else ""
            most = figures[figure._replace(name="policy/mismatch_max")]
            yield (
                f"trainer and sampler{of} differ: token probabilities by a mean factor of {factor:.3g} "
                f"(--max-mismatch {options.max_mismatch:g}), log-probs by at most {most:.3g}. Their weights, "
                "dtypes or kernels are not the same; importance weights (truncated_weights) only partly "
                "correct this"
            )


def short_repeat_warnings(plan: Plan, figures: Mapping[Figure, float]) -> Iterator[str]:
    """Yield a warning for each `repeat` that kept fewer groups than configured."""
    for node in (plan.graph.nodes[i] for i in plan.bodies):
        groups, count = node.options(RepeatOptions).groups, figures.get(Figure(Of.NODE, "kept", node.name))
        if count is not None and count < groups:
            tries = figures[Figure(Of.NODE, "tries", node.name)]
            yield (
                f"{node.name}: only {count:g} of {groups} groups were kept in {tries:g} tries; the iteration "
                "trains on these"
            )


ROWS = 4
WEIGHT_CHECK_TOKENS = 64  # maximum number of tokens per row in a weight check
# how many times further from 1 the mean factor may be than in float32. Unlikely tokens have the largest
# rounding errors, and a prompt may contain them: Gemma 3 270M has factors of 1.03 to 1.08 between two engines
# of equal precision.
ROUNDING = {"bfloat16": 3.0}


@dataclass(frozen=True)
class WeightCheck:
    """The weight check: each role's trainer and generator score the same fixed tokens."""

    engine: Engine
    roles: tuple[str, ...]
    rows: Batch  # prompts, and the tokens after them that are scored
    every: int  # iterations between two checks

    def __call__(self, iteration: int) -> dict[Figure, float]:
        """Return the check's metrics for each role, or {} if no check is due in this iteration.

        The metrics are the largest and the mean difference between a token's two log-probs, and the mean
        factor between its two probabilities.
        """
        if self.every == 0 or iteration % self.every:
            return {}
        metrics: dict[Figure, float] = {}
        for role in self.roles:
            sampler, trainer = (
                self.engine.score(role, self.rows),
                self.engine.forward(role, ("logprobs",), self.rows),
            )
            one, other = (
                self.engine.fetch(batch.select("logprobs")).data["logprobs"].value.double()
                for batch in (sampler, trainer)
            )
            apart = (one - other).abs()
            measured = {"max": apart.max(), "mean": apart.mean(), "factor": apart.exp().mean()}
            metrics |= {
                Figure(Of.WEIGHT_CHECK, name, role=role): float(value) for name, value in measured.items()
            }
        self.engine.finished()
        return metrics


def make_weight_check(roles: Roles, engine: Engine, data: Dataset, options: Options) -> WeightCheck | None:
    """Return a run's weight check.

    Returns None if there are no roles to compare, or if every prompt is shorter than two tokens.
    """
    names = tuple(name for name, role in roles.items() if has_weight_check(role, options))
    if not names:
        return None
    rows = weight_check_rows(data.batch(list(itertools.islice(data.usable(), ROWS))))
    return WeightCheck(engine, names, rows, options.canary) if len(rows) else None


def weight_check_rows(prompts: Batch) -> Batch:
    """Split each prompt into two halves: a shorter prompt, and tokens to score. Return these rows."""
    tokens = [row[:WEIGHT_CHECK_TOKENS] for row in prompts.data["prompt_tokens"].lists() if len(row) > 1]
    return Batch.of(
        prompt_tokens=[row[: len(row) // 2] for row in tokens],
        tokens=[row[len(row) // 2 :] for row in tokens],
    )


def weight_check_warnings(
    metrics: Mapping[Figure, float], most: float, dtype: str = "float32"
) -> Iterator[str]:
    """Yield a warning for each role whose trainer and generator differ by a mean factor above ``most``.

    ``metrics``: the result of the weight check. A larger difference is allowed for dtypes smaller than
    float32, because they round more.
    """
    allowed = 1 + (most - 1) * ROUNDING.get(dtype, 1.0)
    limit = f"--max-mismatch {most:g}" + (
        f", with the rounding of {dtype} {allowed:g}" if allowed > most else ""
    )
    for figure, factor in metrics.items():
        if figure.name == "factor" and factor > allowed:
            yield (
                f"weight check: sampler and trainer of role '{figure.role}' score fixed tokens differently, "
                f"by a mean factor of {factor:.3g} ({limit}), log-probs by at most "
                f"{metrics[figure._replace(name='max')]:.3g}: their dtypes or kernels differ, or a weight "
                "did not arrive"
            )


SECONDS = 10.0  # time limit for checking records; the rest are checked later


def screen_records(
    data: Dataset,
    graph: Graph,
    roles: Roles,
    options: Options,
    note: Callable[[str], None],
    begun: bool = False,
) -> tuple[Prompts, Dataset]:
    """Remove unusable records. Return a cursor over the training records, and the held-out records.

    If a model can't handle a record, PlanError is raised. With ``--bad-records skip``, or if the run has
    ``begun``, the record is skipped and reported to ``note`` instead. Pairs of equal responses are reported
    too; if all pairs are like that, PlanError is raised.
    """
    limited = replace(data, room=room(graph, roles, options.reward, data.shape != "prompts"))
    training, held_out = split_records(limited, options.held_out)
    prompts, began = prompts_of(training, options.seed), time.monotonic()
    asides = held_out.faulty(range(len(held_out)))
    judged = prompts.check(SECONDS)
    faults = [*data.faults, *asides.values(), *prompts.faults.values()]
    total = judged + len(held_out) + len(data.faults)
    if faults and (len(faults) == total or (not begun and options.bad_records == "stop")):
        raise refused(data.name, in_order(faults), total, limited.room)
    if faults:
        note(f"skipped {len(faults)} of {total} records of {data.name}: {spoken(in_order(faults))}")
    if judged < len(training):
        note(
            f"checked {judged} of {len(training)} training records in {time.monotonic() - began:.0f} s; the "
            "others are checked when they are drawn, and skipped if they cannot be used"
        )
    equal = equal_pairs(data, SECONDS)
    if not begun:
        check_pairs(data, equal)
    if equal:
        note(told(data, equal))
    usable = [record for i, record in enumerate(held_out.records) if i not in asides]
    return prompts, replace(held_out, records=usable)


def in_order(faults: Sequence[Fault]) -> list[Fault]:
    """Sort faults by the position of their records in the data."""
    return sorted(faults, key=lambda fault: (fault.place.path, fault.place.line) if fault.place else ("", 0))
