"""When a run must not go on as if nothing were wrong: rewards that are missing, numbers that are not
finite.

Here too: records of the data that no model can be given, and canaries: fixed tokens that trainer and
generator both score.
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
from rlflow.config.roles.bound import Roles, has_canary
from rlflow.config.roles.opened_data import split_records
from rlflow.config.roles.prompt_room import room
from rlflow.data.dataset import Dataset
from rlflow.data.faults import Fault, refused, spoken
from rlflow.data.mixed import prompts_of
from rlflow.data.pairs import check_pairs, equal_pairs, told
from rlflow.data.prompts import Prompts
from rlflow.errors import StageError, listed
from rlflow.execution.engine import Engine
from rlflow.execution.summary import IterationSummary
from rlflow.training.metrics import MERGE_ROUNDING


class Guard:
    """Stops a run. ``reasons`` gives the first message of each cause of missing rewards."""

    def __init__(self, options: Options, reasons: Callable[[], Mapping[Cause, str]]) -> None:
        self.options, self.reasons = options, reasons
        self.bad = 0  # iterations in a row in which an update could take no step
        self._merged: set[str] = set()  # updates whose adapters were warned of
        self._known: set[Cause] = set()  # causes of missing rewards that were said

    def check(self, iteration: int, figures: Mapping[Figure, float], summary: IterationSummary) -> None:
        """Raises StageError where too many rewards are missing, or nothing finite was left to learn from for
        too long."""
        self._missing(iteration, figures, summary)
        stuck = [
            figure.node
            for figure, value in figures.items()
            if figure.of is Of.UPDATE and figure.name == "steps" and value == 0
        ]
        self.bad = self.bad + 1 if stuck else 0
        if self.options.max_bad and self.bad >= self.options.max_bad:
            rows = summary.broken
            raise StageError(
                stuck[0],
                iteration,
                len(rows),
                f"no finite step for {self.bad} iterations in a row (--max-bad). Rows that "
                f"are not finite, as position.sample: {listed(rows) if rows else _of_gradient(*summary.largest)}",
            )

    def missing_warnings(self, figures: Mapping[Figure, float]) -> Iterator[str]:
        """A warning for each cause of missing rewards that no iteration before had, with its first
        message."""
        counts: Counter[Cause] = Counter()
        for figure, count in figures.items():
            counts[Cause(figure.name, figure.part)] += int(count) if figure.of is Of.MISSING else 0
        causes = [cause for cause, count in counts.items() if count and cause not in self._known]
        if not causes or _rate(figures) > self.options.max_missing:  # the error says them
            return
        messages = self.reasons()
        for cause in causes:
            self._known.add(cause)
            message = " ".join(messages.get(cause, "").split())[:LONGEST]
            traceback = "; rewards.txt has the whole traceback" if cause.name == RAISED else ""
            yield (
                f"{counts[cause]} rewards are missing, and their rows are left out: {cause}: {message} "
                f"(from now on counted alone, as reward/missing_* of the metrics{traceback})"
            )

    def merge_warnings(self, figures: Mapping[Figure, float]) -> Iterator[str]:
        """A warning for each update whose adapters lose more than half of what they have learned where they
        are merged, once."""
        for figure, share in figures.items():
            if (
                figure.of is Of.UPDATE
                and figure.name == MERGE_ROUNDING
                and share > HALF
                and figure.node not in self._merged
            ):
                self._merged.add(figure.node)
                yield (
                    f"{figure.node}: merged into weights of fewer bits, what the adapters have learned is "
                    f"off by {share:.0%} of its size, and rows are sampled with that. The share falls as "
                    "they learn more; --dtype float32, or a larger --lr, is more exact. final/ has the "
                    "merged weights in float32, and the adapters beside them (from now on the metric alone "
                    "tells)"
                )

    def _missing(self, iteration: int, figures: Mapping[Figure, float], summary: IterationSummary) -> None:
        rate = _rate(figures)
        if rate <= self.options.max_missing:
            return
        reasons = self.reasons()
        causes = "; ".join(f"{cause}: {message}" for cause, message in reasons.items())
        traceback = (
            ". The whole traceback is in rewards.txt of the run's folder"
            if any(cause.name == RAISED for cause in reasons)
            else ""
        )
        raise StageError(
            "reward",
            iteration,
            summary.scored,
            f"{rate:.0%} of the rewards are missing, expected at most "
            f"{self.options.max_missing:.0%} (--max-missing). {causes or 'the scores are NaN'}{traceback}",
        )


def _of_gradient(column: str, largest: float) -> str:
    """Why no step is finite although every row is. ``largest``: the number furthest from 0 in a column,
    without its sign."""
    if largest <= OVERFLOWS:
        return "none: the gradient is not"
    return (
        f"none: the gradient is too large for float32, since '{column}' has numbers of {largest:.3g}, which "
        "losses square. Scale them down where they are made, such as in the reward"
    )


def loss_warnings(figures: Mapping[Figure, float]) -> Iterator[str]:
    """Warnings of losses that are not finite while the steps on their gradients are."""
    for figure, value in figures.items():
        if figure.of is Of.UPDATE and figure.name == "loss" and not math.isfinite(value):
            yield (
                f"{figure.node}: the loss is {value}, although its gradient is finite, with which the "
                "steps were taken; a term without "
                "a gradient is too large for float32 or NaN, and the metric is null"
            )


def _rate(figures: Mapping[Figure, float]) -> float:
    """The highest share of missing rewards among the rows of any role."""
    return max(
        (
            value
            for figure, value in figures.items()
            if figure.of is Of.SCORES and figure.name == "missing_rate"
        ),
        default=0.0,
    )


HALF = 0.5  # of what adapters have learned
OVERFLOWS = 1e18  # the square of what is larger is more than float32 holds
# the cause of rows without a reward since the user's function raised, which prints the traceback
RAISED = "raised"
LONGEST = 300  # characters of a reward's message in a warning


def mismatch_warnings(options: Options, figures: Mapping[Figure, float], role: str = "") -> Iterator[str]:
    """Warnings of a sampler that gives tokens other log-probs than the trainer, for each role that has
    figures of its own. ``role``: of figures without one, where several roles sample. Samples with a staleness
    are of other weights, and the null backend's numbers of none."""
    if options.staleness or options.backend == "null":
        return
    for figure, factor in figures.items():
        if figure.of is Of.ROWS and figure.name == "policy/mismatch_factor" and factor > options.max_mismatch:
            of = f" of {figure.role or role}" if figure.role or role else ""
            most = figures[figure._replace(name="policy/mismatch_max")]
            yield (
                f"trainer and sampler{of} differ by a factor of {factor:.3g} on a token, in the mean "
                "(--max-mismatch "
                f"{options.max_mismatch:g}): log-probs by {most:.3g} at most. Their weights, dtypes "
                "or kernels are not the same; importance weights (truncated_weights) make up for little of it"
            )


def short_repeat_warnings(plan: Plan, figures: Mapping[Figure, float]) -> Iterator[str]:
    """Warnings of repeats that kept fewer groups than they were to."""
    for node in (plan.graph.nodes[i] for i in plan.bodies):
        groups, count = node.options(RepeatOptions).groups, figures.get(Figure(Of.NODE, "kept", node.name))
        if count is not None and count < groups:
            tries = figures[Figure(Of.NODE, "tries", node.name)]
            yield (
                f"{node.name}: {count:g} of {groups} groups were kept in {tries:g} tries; these are "
                "trained on"
            )


ROWS = 4
CANARY_TOKENS = 64  # tokens of a canary
# times by which the mean factor may be further from 1 than in float32: tokens of a prompt may be unlikely,
ROUNDING = {"bfloat16": 3.0}
# and those round by the most. Gemma 3 270M has factors of 1.03 to 1.08 between two engines that are both as
# close to float32.


@dataclass(frozen=True)
class Canary:
    """Scores fixed tokens with the trainer and the generator of roles."""

    engine: Engine
    roles: tuple[str, ...]
    rows: Batch  # the tokens that are scored, and prompts before them
    every: int  # iterations from one time to the next

    def __call__(self, iteration: int) -> dict[Figure, float]:
        """Metrics of each role: the largest and the mean difference of a token's log-prob, and the mean
        factor between its probabilities."""
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
            metrics |= {Figure(Of.CANARY, name, role=role): float(value) for name, value in measured.items()}
        self.engine.finished()
        return metrics


def canary(roles: Roles, engine: Engine, data: Dataset, options: Options) -> Canary | None:
    """None where there are no roles to compare, or where no prompt has two tokens."""
    names = tuple(name for name, role in roles.items() if has_canary(role, options))
    if not names:
        return None
    rows = canary_rows(data.batch(list(itertools.islice(data.usable(), ROWS))))
    return Canary(engine, names, rows, options.canary) if len(rows) else None


def canary_rows(prompts: Batch) -> Batch:
    """Each prompt cut in two: tokens that are read, and tokens that are scored."""
    tokens = [row[:CANARY_TOKENS] for row in prompts.data["prompt_tokens"].lists() if len(row) > 1]
    return Batch.of(
        prompt_tokens=[row[: len(row) // 2] for row in tokens],
        tokens=[row[len(row) // 2 :] for row in tokens],
    )


def canary_warnings(metrics: Mapping[Figure, float], most: float, dtype: str = "float32") -> Iterator[str]:
    """Warnings of canaries that differ by more than a factor of ``most``, or by what rounding makes of it in
    a shorter dtype."""
    allowed = 1 + (most - 1) * ROUNDING.get(dtype, 1.0)
    limit = f"--max-mismatch {most:g}" + (
        f", with the rounding of {dtype} {allowed:g}" if allowed > most else ""
    )
    for figure, factor in metrics.items():
        if figure.name == "factor" and factor > allowed:
            yield (
                f"the sampler of role '{figure.role}' scores fixed tokens otherwise than its trainer, by a "
                f"factor of {factor:.3g} in the mean ({limit}), log-probs by "
                f"{metrics[figure._replace(name='max')]:.3g} at most: their dtypes or kernels differ, or a "
                "weight did not arrive"
            )


SECONDS = 10.0  # for checking records to train on; the rest are checked when they are drawn


def screen_records(
    data: Dataset,
    graph: Graph,
    roles: Roles,
    options: Options,
    note: Callable[[str], None],
    begun: bool = False,
) -> tuple[Prompts, Dataset]:
    """The cursor over the records to train on, and those held out, all of which can be used. Raises PlanError
    for records that cannot be, unless they are to be left out (--bad-records skip) or the run has ``begun``;
    then they are told to ``note``. Pairs whose responses are the same are told, and refused where all are."""
    limited = replace(data, room=room(graph, roles, options.reward, data.shape != "prompts"))
    training, held_out = split_records(limited, options.held_out)
    prompts, began = prompts_of(training, options.seed), time.monotonic()
    asides = held_out.faulty(range(len(held_out)))
    judged = prompts.check(SECONDS)
    faults = [*data.faults, *asides.values(), *prompts.faults.values()]
    total = judged + len(held_out) + len(data.faults)
    if faults and (len(faults) == total or not begun and options.bad_records == "stop"):
        raise refused(data.name, in_order(faults), total, limited.room)
    if faults:
        note(f"{len(faults)} of {total} records of {data.name} are left out: {spoken(in_order(faults))}")
    if judged < len(training):
        note(
            f"{judged} of {len(training)} records to train on were checked in {time.monotonic() - began:.0f} "
            "s; the others are checked when they are drawn, and left out where they cannot be used"
        )
    equal = equal_pairs(data, SECONDS)
    if not begun:
        check_pairs(data, equal)
    if equal:
        note(told(data, equal))
    usable = [record for i, record in enumerate(held_out.records) if i not in asides]
    return prompts, replace(held_out, records=usable)


def in_order(faults: Sequence[Fault]) -> list[Fault]:
    """Faults as their records stand in the data."""
    return sorted(faults, key=lambda fault: (fault.place.path, fault.place.line) if fault.place else ("", 0))
