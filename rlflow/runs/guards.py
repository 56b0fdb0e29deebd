"""When a run must not go on as if nothing were wrong: rewards that are missing, numbers that are not finite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from rlflow.config.options import Options
from rlflow.errors import StageError, listed
from rlflow.execution.summary import IterationSummary
from rlflow.plan import Plan


class Guard:
    """Stops a run. ``reasons`` gives the first message of each cause of missing rewards."""

    def __init__(self, options: Options, reasons: Callable[[], Mapping[str, str]]) -> None:
        self.options, self.reasons = options, reasons
        self.bad = 0  # iterations in a row in which an update could take no step
        self._known: set[str] = set()  # causes of missing rewards that were said

    def check(self, iteration: int, metrics: Mapping[str, float], summary: IterationSummary) -> None:
        """Raises StageError where too many rewards are missing, or nothing finite was left to learn from for too long."""
        self._missing(iteration, metrics, summary)
        stuck = [name.removesuffix("/steps") for name, value in metrics.items() if name.endswith("/steps") and value == 0]
        self.bad = self.bad + 1 if stuck else 0
        if self.options.max_bad and self.bad >= self.options.max_bad:
            rows = summary.broken
            raise StageError(stuck[0], iteration, len(rows), f"no finite step for {self.bad} iterations in a row (--max-bad). Rows that "
                             f"are not finite, as position.sample: {listed(rows) if rows else 'none: the gradient is not'}")

    def missing_warnings(self, metrics: Mapping[str, float]) -> Iterator[str]:
        """A warning for each cause of missing rewards that no iteration before had, with its first message."""
        counts: Counter[str] = Counter()
        for name, count in metrics.items():
            counts[name.partition(MISSING)[2]] += int(count) if MISSING in name and not name.endswith(RATE) else 0
        causes = [cause for cause, count in counts.items() if count and cause not in self._known]
        if not causes or _rate(metrics) > self.options.max_missing:  # the error says them
            return
        messages = self.reasons()
        for cause in causes:
            self._known.add(cause)
            message = " ".join(messages.get(cause, "").split())[:LONGEST]
            traceback = "; rewards.txt has the whole traceback" if _by_raising(cause) else ""
            yield (f"{counts[cause]} rewards are missing, and their rows are left out: {cause}: {message} "
                   f"(from now on counted alone, as reward/missing_* of the metrics{traceback})")

    def _missing(self, iteration: int, metrics: Mapping[str, float], summary: IterationSummary) -> None:
        rate = _rate(metrics)
        if rate <= self.options.max_missing:
            return
        reasons = self.reasons()
        causes = "; ".join(f"{cause}: {message}" for cause, message in reasons.items())
        traceback = ". The whole traceback is in rewards.txt of the run's folder" if any(map(_by_raising, reasons)) else ""
        raise StageError("reward", iteration, summary.scored, f"{rate:.0%} of the rewards are missing, expected at most "
                         f"{self.options.max_missing:.0%} (--max-missing). {causes or 'the scores are NaN'}{traceback}")


def _by_raising(cause: str) -> bool:
    """Whether rows have no reward since the user's function raised, which prints the traceback."""
    return cause.rpartition("/")[2] == "raised"


def _rate(metrics: Mapping[str, float]) -> float:
    """The highest share of missing rewards among the rows of any role."""
    return max((value for name, value in metrics.items() if name.endswith(RATE)), default=0.0)


MISMATCH = "policy/mismatch_factor"
RATE = "reward/missing_rate"
MISSING = "/missing_"  # in the names of metrics, after a reward role and before the cause
LONGEST = 300  # characters of a reward's message in a warning


def mismatch_warnings(options: Options, metrics: Mapping[str, float], role: str = "") -> Iterator[str]:
    """Warnings of a sampler that gives tokens other log-probs than the trainer, for each role whose metrics have its name. ``role``: of
    metrics without a name, where several roles sample. Samples with a staleness are of other weights, and the null backend's numbers of
    none."""
    if options.staleness or options.backend == "null":
        return
    for name, factor in metrics.items():
        if name.endswith(MISMATCH) and factor > options.max_mismatch:
            prefix = name.removesuffix(MISMATCH)
            of = f" of {prefix.rstrip('/') or role}" if prefix or role else ""
            yield (f"trainer and sampler{of} differ by a factor of {factor:.3g} on a token, in the mean (--max-mismatch "
                   f"{options.max_mismatch:g}): log-probs by {metrics[f'{prefix}policy/mismatch_max']:.3g} at most. Their weights, dtypes "
                   "or kernels are not the same; importance weights (truncated_weights) make up for little of it")


def short_repeat_warnings(plan: Plan, metrics: Mapping[str, float]) -> Iterator[str]:
    """Warnings of repeats that kept fewer groups than they were to."""
    for name in (plan.graph.nodes[i].name for i in plan.bodies):
        groups, count = int(plan.program.settings[name]["groups"]), metrics.get(f"{name}/kept")
        if count is not None and count < groups:
            yield f"{name}: {count:g} of {groups} groups were kept in {metrics[f'{name}/tries']:g} tries; these are trained on"
