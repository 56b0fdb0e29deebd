"""The rules: what must hold of a run's measures for a finding, in the order in which findings are told.

A cause stands before what it brings about: a sampler that is not synchronised lowers entropy, rewards and
clipping too. Alarms say that what is learned from is not what it seems, or that nothing is learned at all;
advice is on settings. Every threshold says where it is
from: "seed 0" are the runs of `python benchmarks/stalls.py` with that seed, by which no rule is judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rlflow.author.figures import Of
from rlflow.monitoring.diagnosis.evidence import Measured


@dataclass(frozen=True)
class RuleCondition:
    """A measure beside a threshold, and where the threshold is from."""

    measure: str
    relation: Literal["above", "below", "at most"]
    threshold: float
    source: str

    def holds(self, value: float | None) -> bool:
        """Whether a value is such; what is not known is not."""
        if value is None:
            return False
        if self.relation == "at most":
            return value <= self.threshold
        return value > self.threshold if self.relation == "above" else value < self.threshold


@dataclass(frozen=True)
class Rule:
    """A reason for which a run learns little. ``words`` and ``remedy`` are filled with the measures by
    name."""

    name: str
    alarm: bool
    conditions: Sequence[RuleCondition]
    words: str
    remedy: str
    # a figure whose first value beyond the first condition's threshold dates the finding
    since: Measured | None = None


STALLED = RuleCondition(
    "improvement", "below", 0.1, "seed 0: runs that learn rise by more than 0.2 of the scores' width"
)
IN_STEP = RuleCondition(
    "staleness", "at most", 0, "with a staleness the sampler's weights are meant to be older"
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
        "the sampler does not follow the trainer, as their log-probs were {mismatch_first:.2g} apart on a "
        "token at first, and are {mismatch:.2g} apart now",
        "look at how the weights reach the generator: --verify-every 1 compares them after each "
        "transfer, --canary 1 what comes of them",
        (Of.ROWS, "policy/mismatch_mean"),
    ),
    Rule(
        "mismatch",
        True,
        (
            RuleCondition("factor_first", "above", 1.02, "seed 0; bfloat16 against float32 stays under 1.01"),
            IN_STEP,
        ),
        "sampler and trainer differ from the first iteration on, though their weights are equal, by a "
        "factor of {factor_first:.3g} on a token in the mean",
        "make dtype, quantisation and kernels of both the same (--actor.generator, --dtype); "
        "truncated_weights makes up for little",
        (Of.ROWS, "policy/mismatch_factor"),
    ),
    Rule(
        "skipped-steps",
        True,
        (RuleCondition("skipped", "above", 0.1, "a sound run skips none"),),
        "{skipped:.0%} of the optimizer steps were skipped because the gradient was not finite",
        "lower --actor.lr, or look for what is not finite: rlflow show names the rows",
    ),
    Rule(
        "missing",
        True,
        (RuleCondition("missing", "above", 0.3, "half of --max-missing and more"),),
        "{missing:.0%} of the rewards are missing, and their rows are left out",
        "look at missing_* of the metrics for the cause; --reward-timeout where it is the deadline",
        (Of.SCORES, "missing_rate"),
    ),
    Rule(
        "stale",
        True,
        (
            RuleCondition("kl_sampler", "above", 0.3, "seed 0: 2.6 and more at a staleness of 9"),
            RuleCondition("staleness", "above", 0, "rows are of the newest weights otherwise"),
        ),
        "rows are sampled with weights that have moved on, so trainer and sampler are {kl_sampler:.2g} "
        "nats apart on a token, at a staleness of {staleness:.0f}",
        "lower --staleness, or --actor.lr",
        (Of.ROWS, "policy/kl_sampler"),
    ),
    Rule(
        "entropy-low",
        True,
        (
            RuleCondition(
                "entropy_early", "below", 0.1, "seed 0: 0.034 at most where planted, 0.5 and more in others"
            ),
            RuleCondition("improvement", "below", 0.25, "seed 0: 0.16 at most where planted"),
        ),
        "the policy hardly varies what it says, with an entropy of {entropy_early:.2g} nats on a token "
        "from the beginning",
        "raise the temperature of sampling (--actor.generate.temperature), or start from a model that "
        "still varies",
    ),
    Rule(
        "rate-high",
        True,
        (RuleCondition("moved_most", "above", 0.3, "seed 0: sound runs stay under 0.1"), STALLED),
        "an update moves the policy too far, the log-prob of a token changing by {moved_most:.2g} nats "
        "in the mean within one update",
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
        "{flat_lowest:.0%} of the groups have the lowest score for all samples, while the others score "
        "{mixed_place:.0%} of what can be had, so the reward says nothing on a part of the data",
        "read samples.jsonl of these prompts, mend the reward or drop them; `repeat` filters groups with "
        "one score",
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
        "{flat:.0%} of the groups have one score for all samples, and it is a low one, so the task is "
        "too hard for this model",
        "raise --hp.samples, begin with easier data, or filter with `repeat`",
        (Of.SCORES, "even_groups"),
    ),
    Rule(
        "too-easy",
        True,
        (
            RuleCondition("flat_early", "above", 0.4, "seed 0"),
            RuleCondition("place", "above", 0.7, "seed 0: 0.80 and more where planted"),
            STALLED,
        ),
        "{flat:.0%} of the groups have one score for all samples, and it is a high one, so the task is "
        "too easy for this model",
        "take harder data, or a reward that asks for more",
        (Of.SCORES, "even_groups"),
    ),
    Rule(
        "flat-groups",
        True,
        (
            RuleCondition("flat", "above", 0.7, "seven of ten groups teach nothing"),
            RuleCondition("place", "above", 0.2, "else too-hard"),
            RuleCondition("place", "below", 0.7, "else too-easy"),
            STALLED,
        ),
        "{flat:.0%} of the groups have one score for all samples",
        "raise --hp.samples, or filter with `repeat`",
        (Of.SCORES, "even_groups"),
    ),
    Rule(
        "nothing-moves",
        True,
        (
            RuleCondition("moving", "at most", 0.0, "a token with an advantage has a gradient"),
            RuleCondition("uneven", "above", 0.0, "groups without any difference have no advantage"),
        ),
        "no token of the update has a gradient",
        "look at the loss: rlflow check FILE, and whether its advantages are all zero",
    ),
    Rule(
        "saturated",
        False,
        (
            RuleCondition("flat", "above", 0.6, "three of five groups teach nothing"),
            RuleCondition("place_now", "above", 0.8, "four of five prompts"),
            STALLED,
        ),
        "{flat:.0%} of the groups have one score for all samples, and most of these prompts are learned",
        "raise --hp.samples, filter with `repeat`, or take harder data",
        (Of.SCORES, "even_groups"),
    ),
    Rule(
        "kl-strong",
        False,
        (
            RuleCondition("odds", "below", 2.0, "exp(width / beta), the most that any policy can gain"),
            STALLED,
        ),
        "the KL charge holds the policy at its reference, since with beta {beta:g} good answers can become "
        "at most {odds:.2g} times likelier over bad ones",
        "lower --hp.beta",
    ),
    Rule(
        "critic-cold",
        False,
        (RuleCondition("explained", "below", -0.2, "a constant explains 0, and a new head starts near it"),),
        "the critic explains nothing of the returns (explained variance {explained:.2f}), so advantages "
        "are mostly its error",
        "warm it up: --hp.warmup, --critic.lr",
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
        "clipping takes away the gradient of {clipped:.0%} of the tokens with something to learn from, "
        "though the policy moves by {moved:.2g} nats only",
        "raise --hp.clip",
    ),
    Rule(
        "rate-low",
        False,
        (RuleCondition("moved", "below", 3e-3, "seed 0"), STALLED),
        "updates hardly move the policy, the log-prob of a token changing by {moved:.2g} nats in the "
        "mean within one update",
        "raise --actor.lr (now {lr:.2g})",
        (Of.UPDATE, "funnel/moved"),
    ),
)
