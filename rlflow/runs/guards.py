"""When a run must not go on as if nothing were wrong: rewards that are missing, numbers that are not finite."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from rlflow.author.figures import Cause, Figure, Of
from rlflow.author.node_options import RepeatOptions
from rlflow.compiler.plan import Plan
from rlflow.config.options import Options
from rlflow.errors import StageError, listed
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
        """Raises StageError where too many rewards are missing, or nothing finite was left to learn from for too long."""
        self._missing(iteration, figures, summary)
        stuck = [figure.node for figure, value in figures.items() if figure.of is Of.UPDATE and figure.name == "steps" and value == 0]
        self.bad = self.bad + 1 if stuck else 0
        if self.options.max_bad and self.bad >= self.options.max_bad:
            rows = summary.broken
            raise StageError(stuck[0], iteration, len(rows), f"no finite step for {self.bad} iterations in a row (--max-bad). Rows that "
                             f"are not finite, as position.sample: {listed(rows) if rows else _of_gradient(*summary.largest)}")

    def missing_warnings(self, figures: Mapping[Figure, float]) -> Iterator[str]:
        """A warning for each cause of missing rewards that no iteration before had, with its first message."""
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
            yield (f"{counts[cause]} rewards are missing, and their rows are left out: {cause}: {message} "
                   f"(from now on counted alone, as reward/missing_* of the metrics{traceback})")

    def merge_warnings(self, figures: Mapping[Figure, float]) -> Iterator[str]:
        """A warning for each update whose adapters lose more than half of what they have learned where they are merged, once."""
        for figure, share in figures.items():
            if figure.of is Of.UPDATE and figure.name == MERGE_ROUNDING and share > HALF and figure.node not in self._merged:
                self._merged.add(figure.node)
                yield (f"{figure.node}: merged into weights of fewer bits, what the adapters have learned is off by {share:.0%} of its "
                       "size, and rows are sampled with that. The share falls as they learn more; --dtype float32, or a larger --lr, is "
                       "more exact. final/ has the merged weights in float32, and the adapters beside them (from now on the metric alone "
                       "tells)")

    def _missing(self, iteration: int, figures: Mapping[Figure, float], summary: IterationSummary) -> None:
        rate = _rate(figures)
        if rate <= self.options.max_missing:
            return
        reasons = self.reasons()
        causes = "; ".join(f"{cause}: {message}" for cause, message in reasons.items())
        traceback = ". The whole traceback is in rewards.txt of the run's folder" if any(cause.name == RAISED for cause in reasons) else ""
        raise StageError("reward", iteration, summary.scored, f"{rate:.0%} of the rewards are missing, expected at most "
                         f"{self.options.max_missing:.0%} (--max-missing). {causes or 'the scores are NaN'}{traceback}")


def _of_gradient(column: str, largest: float) -> str:
    """Why no step is finite although every row is. ``largest``: the number furthest from 0 in a column, without its sign."""
    if largest <= OVERFLOWS:
        return "none: the gradient is not"
    return (f"none: the gradient is too large for float32, since '{column}' has numbers of {largest:.3g}, which losses square. Scale them "
            "down where they are made, such as in the reward")


def loss_warnings(figures: Mapping[Figure, float]) -> Iterator[str]:
    """Warnings of losses that are not finite while the steps on their gradients are."""
    for figure, value in figures.items():
        if figure.of is Of.UPDATE and figure.name == "loss" and not math.isfinite(value):
            yield (f"{figure.node}: the loss is {value}, although its gradient is finite, with which the steps were taken; a term without "
                   "a gradient is too large for float32 or NaN, and the metric is null")


def _rate(figures: Mapping[Figure, float]) -> float:
    """The highest share of missing rewards among the rows of any role."""
    return max((value for figure, value in figures.items() if figure.of is Of.SCORES and figure.name == "missing_rate"), default=0.0)


HALF = 0.5  # of what adapters have learned
OVERFLOWS = 1e18  # the square of what is larger is more than float32 holds
RAISED = "raised"  # the cause of rows without a reward since the user's function raised, which prints the traceback
LONGEST = 300  # characters of a reward's message in a warning


def mismatch_warnings(options: Options, figures: Mapping[Figure, float], role: str = "") -> Iterator[str]:
    """Warnings of a sampler that gives tokens other log-probs than the trainer, for each role that has figures of its own. ``role``: of
    figures without one, where several roles sample. Samples with a staleness are of other weights, and the null backend's numbers of
    none."""
    if options.staleness or options.backend == "null":
        return
    for figure, factor in figures.items():
        if figure.of is Of.ROWS and figure.name == "policy/mismatch_factor" and factor > options.max_mismatch:
            of = f" of {figure.role or role}" if figure.role or role else ""
            most = figures[figure._replace(name="policy/mismatch_max")]
            yield (f"trainer and sampler{of} differ by a factor of {factor:.3g} on a token, in the mean (--max-mismatch "
                   f"{options.max_mismatch:g}): log-probs by {most:.3g} at most. Their weights, dtypes "
                   "or kernels are not the same; importance weights (truncated_weights) make up for little of it")


def short_repeat_warnings(plan: Plan, figures: Mapping[Figure, float]) -> Iterator[str]:
    """Warnings of repeats that kept fewer groups than they were to."""
    for node in (plan.graph.nodes[i] for i in plan.bodies):
        groups, count = node.options(RepeatOptions).groups, figures.get(Figure(Of.NODE, "kept", node.name))
        if count is not None and count < groups:
            tries = figures[Figure(Of.NODE, "tries", node.name)]
            yield f"{node.name}: {count:g} of {groups} groups were kept in {tries:g} tries; these are trained on"
