"""The rules of `rlflow explain`, in the order of their findings.

A rule is a set of conditions on a run's measures. Causes come before their effects; for example, a sampler
with outdated weights also lowers entropy, rewards and clipping. An alarm means that the training data isn't
what it seems, or that nothing is learned. Advice is about a setting. Every threshold says where it comes
from. "seed 0" refers to the runs of `python benchmarks/stalls.py` with that seed, which aren't used to test
the rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlflow.author.figures import Of
from rlflow.monitoring.diagnosis.evidence import Measured


@dataclass(frozen=True)
class RuleCondition:
    """A measure, the threshold it is compared with, and where the threshold comes from."""

    measure: str
    relation: Literal["above", "below", "at most"]
    threshold: float
    source: str

    def holds(self, value: float | None) -> bool:
        """Whether a measure's value meets the condition. An unknown value (None) never does."""
        if value is None:
            return False
        if self.relation == "at most":
            return value <= self.threshold
        return value > self.threshold if self.relation == "above" else value < self.threshold


@dataclass(frozen=True)
class Rule:
    """A reason why a run may learn little, with the conditions that reveal it.

    ``words`` and ``remedy`` are templates that are filled with measures by name.
    """

    name: str
    alarm: bool
    conditions: Sequence[RuleCondition]
    words: str
    remedy: str
    # the finding's iteration is the first in which this figure is beyond the first condition's threshold
    since: Measured | None = None


STALLED = RuleCondition(
    "improvement", "below", 0.1, "seed 0: in runs that learn, scores rise by more than 0.2 of their range"
)
IN_STEP = RuleCondition(
    "staleness", "at most", 0, "with --staleness the sampler's weights are older on purpose"
)

RULES: Sequence[Rule] = (
    Rule(
        "unsynchronised",
        True,
        (
            RuleCondition("mismatch", "above", 3e-3, "rounding in float32 is about 1e-6"),
            RuleCondition("drift", "above", 50.0, "seed 0"),
            RuleCondition("mismatch_first", "below", 3e-3, "equal weights at the start"),
            IN_STEP,
        ),
        "the sampler does not follow the trainer (their log-probs differed by {mismatch_first:.2g} per token "
        "at first, and differ by {mismatch:.2g} now)",
        "check the weight transfer to the generator: --verify-every 1 compares the weights after each "
        "transfer, --canary 1 compares log-probs of trainer and generator",
        (Of.ROWS, "policy/mismatch_mean"),
    ),
    Rule(
        "mismatch",
        True,
        (
            RuleCondition("factor_first", "above", 1.02, "seed 0; bfloat16 against float32 stays under 1.01"),
            IN_STEP,
        ),
        "sampler and trainer disagree from the first iteration on, although their weights are equal "
        "(probabilities of a token differ by a factor of {factor_first:.3g} on average)",
        "use the same dtype, quantisation and kernels for both (--actor.generator, --dtype); "
        "truncated_weights only partly corrects this",
        (Of.ROWS, "policy/mismatch_factor"),
    ),
    Rule(
        "skipped-steps",
        True,
        (RuleCondition("skipped", "above", 0.1, "a healthy run skips no steps"),),
        "{skipped:.0%} of the optimizer steps were skipped because the gradient was not finite",
        "lower --actor.lr, or find the values that are not finite: rlflow show names the rows",
    ),
    Rule(
        "missing",
        True,
        (RuleCondition("missing", "above", 0.3, "more than half of --max-missing"),),
        "{missing:.0%} of the rewards are missing, and their rows are skipped",
        "read the metrics missing_* for the cause; if the cause is the deadline, raise --reward-timeout",
        (Of.SCORES, "missing_rate"),
    ),
    Rule(
        "stale",
        True,
        (
            RuleCondition("kl_sampler", "above", 0.3, "seed 0: at least 2.6 at a staleness of 9"),
            RuleCondition("staleness", "above", 0, "otherwise rows come from the newest weights"),
        ),
        "rows are sampled with outdated weights (trainer and sampler differ by {kl_sampler:.2g} nats per "
        "token, at a staleness of {staleness:.0f})",
        "lower --staleness, or --actor.lr",
        (Of.ROWS, "policy/kl_sampler"),
    ),
    Rule(
        "entropy-low",
        True,
        (
            RuleCondition(
                "entropy_early", "below", 0.1, "seed 0: at most 0.034 if planted, at least 0.5 otherwise"
            ),
            RuleCondition("improvement", "below", 0.25, "seed 0: at most 0.16 if planted"),
        ),
        "policy entropy is very low from the beginning ({entropy_early:.2g} nats per token)",
        "raise the sampling temperature (--actor.generate.temperature), or start from a model with more "
        "entropy",
    ),
    Rule(
        "rate-high",
        True,
        (RuleCondition("moved_most", "above", 0.3, "seed 0: healthy runs stay under 0.1"), STALLED),
        "an update moves the policy too far (it changes the log-prob of a token by {moved_most:.2g} nats "
        "on average)",
        "lower --actor.lr (now {lr:.2g}), or --hp.epochs",
        (Of.UPDATE, "funnel/moved"),
    ),
    Rule(
        "length-cap",
        True,
        (RuleCondition("truncated", "above", 0.4, "seed 0"),),
        "{truncated:.0%} of the responses are cut at max_tokens",
        "raise --hp.max_tokens",
        (Of.ROWS, "response/truncated"),
    ),
    Rule(
        "half-constant",
        True,
        (
            RuleCondition("flat_lowest", "above", 0.35, "seed 0"),
            RuleCondition("mixed_place", "above", 0.3, "seed 0"),
        ),
        "{flat_lowest:.0%} of the groups have the lowest score for all samples, while the other groups reach "
        "{mixed_place:.0%} of the score range, so the reward gives no signal on a part of the data",
        "read these prompts in samples.jsonl, then correct the reward or drop the prompts; `repeat` filters "
        "groups with equal scores",
        (Of.SCORES, "even_lowest"),
    ),
    Rule(
        "too-hard",
        True,
        (
            RuleCondition("flat_early", "above", 0.4, "seed 0"),
            RuleCondition("place", "below", 0.2, "seed 0"),
            STALLED,
        ),
        "{flat:.0%} of the groups have equal scores for all samples, and the scores are low, so the task is "
        "too hard for this model",
        "raise --hp.samples, start with easier data, or filter groups with `repeat`",
        (Of.SCORES, "even_groups"),
    ),
    Rule(
        "too-easy",
        True,
        (
            RuleCondition("flat_early", "above", 0.4, "seed 0"),
            RuleCondition("place", "above", 0.7, "seed 0: at least 0.80 if planted"),
            STALLED,
        ),
        "{flat:.0%} of the groups have equal scores for all samples, and the scores are high, so the task is "
        "too easy for this model",
        "use harder data, or a stricter reward",
        (Of.SCORES, "even_groups"),
    ),
    Rule(
        "flat-groups",
        True,
        (
            RuleCondition("flat", "above", 0.7, "seven of ten groups give no signal"),
            RuleCondition("place", "above", 0.2, "otherwise the finding is too-hard"),
            RuleCondition("place", "below", 0.7, "otherwise the finding is too-easy"),
            STALLED,
        ),
        "{flat:.0%} of the groups have equal scores for all samples",
        "raise --hp.samples, or filter groups with `repeat`",
        (Of.SCORES, "even_groups"),
    ),
    Rule(
        "nothing-moves",
        True,
        (
            RuleCondition("moving", "at most", 0.0, "a token with an advantage has a gradient"),
            RuleCondition("uneven", "above", 0.0, "groups with equal scores have no advantage"),
        ),
        "no token of the update has a gradient",
        "check the loss with rlflow check FILE, and whether all advantages are zero",
    ),
    Rule(
        "saturated",
        False,
        (
            RuleCondition("flat", "above", 0.6, "three of five groups give no signal"),
            RuleCondition("place_now", "above", 0.8, "four of five prompts are solved"),
            STALLED,
        ),
        "{flat:.0%} of the groups have equal scores for all samples, and most of these prompts are solved",
        "raise --hp.samples, filter groups with `repeat`, or use harder data",
        (Of.SCORES, "even_groups"),
    ),
    Rule(
        "kl-strong",
        False,
        (
            RuleCondition("odds", "below", 2.0, "exp(score range / beta), the largest gain of any policy"),
            STALLED,
        ),
        "the KL term keeps the policy close to its reference, since with beta {beta:g} the odds of good "
        "answers over bad ones can rise by at most a factor of {odds:.2g}",
        "lower --hp.beta",
    ),
    Rule(
        "critic-cold",
        False,
        (
            RuleCondition(
                "explained", "below", -0.2, "a constant value explains 0, and a new head starts near 0"
            ),
        ),
        "the critic does not explain the returns (explained variance {explained:.2f}), so advantages "
        "consist mostly of its error",
        "train the critic longer before the policy (--hp.warmup), or change --critic.lr",
        (Of.ROWS, "critic/explained_variance"),
    ),
    Rule(
        "clip-tight",
        False,
        (
            RuleCondition("clipped", "above", 0.3, "seed 0"),
            RuleCondition("moved", "below", 0.1, "seed 0"),
            STALLED,
        ),
        "clipping removes the gradient of {clipped:.0%} of the tokens that would have one, although the "
        "policy moves by only {moved:.2g} nats",
        "raise --hp.clip",
    ),
    Rule(
        "rate-low",
        False,
        (RuleCondition("moved", "below", 3e-3, "seed 0"), STALLED),
        "updates hardly move the policy (one update changes the log-prob of a token by {moved:.2g} nats on "
        "average)",
        "raise --actor.lr (now {lr:.2g})",
        (Of.UPDATE, "funnel/moved"),
    ),
)
