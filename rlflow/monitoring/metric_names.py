"""Names of metrics in trackers. They are the names that verl and TRL use, so that existing dashboards work.

    rlflow                          tracker
    actor.update/loss               actor/pg_loss (critic: critic/vf_loss; another role: ROLE/loss)
    actor.update/clipped            actor/pg_clipfrac (critic: critic/vf_clipfrac)
    ROLE.update/NAME                ROLE/NAME (second update line of the role: ROLE#2/NAME)
    reward/mean                     critic/score/mean (another reward role: rewards/ROLE/mean)
    reward/NAME_mean                rewards/NAME/mean (one of several weighted rewards)
    evaluation/SET/FIGURE           val/SET/accuracy, val/SET/accuracy_greedy (a set given with --eval)
    evaluation/SET/mean@n           val-core/SET/acc/mean@n (pass@k: …/best@k/mean; maj@k: …/maj@k/mean)
    other names                     as in TABLE below, or unchanged

A node's seconds are timing_s/NODE. Steps count finished iterations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rlflow.author.figures import SCORE, Figure, Of
from rlflow.monitoring.keys import Figures

TABLE = {
    "evaluation/sampled": "val/accuracy",
    "evaluation/greedy": "val/accuracy_greedy",
    "evaluation/score": "val/score",
    "reward/mean": "critic/score/mean",
    "response/length": "response_length/mean",
    "response/length_max": "response_length/max",
    "response/length_min": "response_length/min",
    "response/truncated": "response_length/clip_ratio",
    "response/tokens_per_second": "perf/tokens_per_second",
    "seconds": "timing_s/step",
    "reward/flat_groups": "frac_reward_zero_std",
    "policy/kl_reference": "objective/kl",
    "policy/kl_sampler": "rollout_corr/kl",
    "policy/mismatch_max": "training/rollout_logprobs_diff_max",
    "policy/mismatch_mean": "training/rollout_logprobs_diff_mean",
    "policy/mismatch_factor": "train/token_mult_prob_error",
    "policy/entropy": "actor/entropy",
    "critic/explained_variance": "critic/vf_explained_var",
}
PROMPTS = "prompts"  # the figure with the number of prompts in a set given with --eval
OF_SETS = {
    "sampled": "val/{}/accuracy",
    "greedy": "val/{}/accuracy_greedy",
    "mean": "val-core/{}/acc/mean@{}",
    "pass": "val-core/{}/acc/best@{}/mean",
    "maj": "val-core/{}/acc/maj@{}/mean",
}
POLICY = {"loss": "pg_loss", "clipped": "pg_clipfrac", "kl": "ppo_kl"}
VALUE = {"loss": "vf_loss", "clipped": "vf_clipfrac"}
# names by role; the purpose of other roles is unknown
HABITS = {"actor": POLICY, "policy": POLICY, "critic": VALUE, "value": VALUE}


def renamed(
    figures: Mapping[Figure, float | None], others: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the finite metrics under the names that trackers use.

    A metric keeps rlflow's name if its tracker name would be ambiguous. ``others``: metrics that already have
    tracker names.
    """
    names = {figure: tracked(figure) for figure in figures}
    taken = {figure.key for figure in figures} | set(others or ())
    renamed_metrics: dict[str, float] = {}
    for figure, value in figures.items():
        if value is not None and math.isfinite(value):
            name = next(name for name in _names(figure, names[figure], taken) if name not in renamed_metrics)
            renamed_metrics[name] = float(value)
    return renamed_metrics | dict(others or {})


def _names(figure: Figure, tracker_name: str, taken: set[str]) -> tuple[str, ...]:
    """Return a metric's possible tracker names, best first. ``taken``: names already in use."""
    plain = () if tracker_name in taken and tracker_name != figure.key else (tracker_name,)
    return (*plain, figure.key, f"{figure.key} ({figure.of})")


def tracked(figure: Figure) -> str:
    """Return a metric's name in trackers."""
    match figure.of:
        case Of.UPDATE:
            head = figure.role + figure.node.removeprefix(f"{figure.role}.update")
            return f"{head}/{HABITS.get(figure.role, {}).get(figure.name, figure.name)}"
        case Of.SET if not figure.role and (form := OF_SETS.get(figure.name.partition("@")[0])):
            return form.format(figure.part, figure.name.partition("@")[2])
        case Of.REWARD if figure.part:
            return f"rewards/{figure.part}/{figure.name}"
        case Of.REWARD if figure.name == "mean" and figure.key not in TABLE:
            return f"rewards/{figure.node}/mean"
        case Of.SCORES | Of.ROWS | Of.RUN | Of.REWARD | Of.EVALUATION:
            plain = figure._replace(role="").key if figure.of in (Of.SCORES, Of.ROWS) else figure.key
            head = f"{figure.role}/" if plain != figure.key else ""
            return head + TABLE.get(plain, plain)
    return figure.key


def plainly(figures: Figures) -> dict[str, float]:
    """Return the metrics under rlflow's own names.

    If two have the same name, the second one gets its kind added in brackets.
    """
    named: dict[str, float] = {}
    for figure, value in figures.items():
        named[f"{figure.key} ({figure.of})" if figure.key in named else figure.key] = value
    return named


def accuracies(evaluation: Figures) -> dict[str, float]:
    """Return an evaluation's accuracies, under the names that users see.

    These are ``sampled`` and ``greedy``, or ``ROLE sampled`` and so on if several roles are evaluated. Then
    come accuracies by data source (``sampled SOURCE``) and by set given with --eval (``SET sampled``). The
    mean score of a flow's own evaluation is left out.
    """
    own = [figure for figure in evaluation if figure.of is Of.EVALUATION and figure != SCORE]
    by_role = [figure for figure in own if figure.role]
    plain = [figure for figure in own if not figure.role and not figure.part]
    by_source = [figure for figure in own if not figure.role and figure.part]
    of_sets = [figure for figure in evaluation if figure.of is Of.SET and figure.name != PROMPTS]
    named = [*(by_role or plain), *(() if by_role else by_source), *of_sets]
    return {figure.key.removeprefix("evaluation/").replace("/", " "): evaluation[figure] for figure in named}


def share(value: float) -> str:
    """Format a fraction as a percentage.

    A value outside 0 to 1 must be a mean score, and is formatted as a number.
    """
    return f"{value:.1%}" if 0 <= value <= 1 else f"{value:.3g}"


def change(before: float, after: float) -> str:
    """Format the difference between two fractions in percentage points.

    If either is outside 0 to 1, they must be mean scores, and the difference is formatted as a number.
    """
    shares = all(0 <= value <= 1 for value in (before, after))
    return f"{100 * (after - before):+.1f} points" if shares else f"{after - before:+.3g}"


OF_EPISODES = ("env/turns", "env/failed")


def own_metrics(figures: Figures) -> list[Figure]:
    """Return the metrics recorded by the user's own stages and environments, sorted by name."""
    return sorted(filter(is_own, figures), key=lambda figure: figure.key)


def is_own(figure: Figure) -> bool:
    """Whether a metric comes from a stage or an environment's log, or describes episodes."""
    return (
        figure.of is Of.STAGE
        or (figure.of is Of.LOGGED and not figure.node)
        or (figure.of is Of.ROWS and figure.name in OF_EPISODES)
    )


def means(figures: Figures) -> list[Figure]:
    """Return the metrics that are mean scores of reward roles, sorted by name."""
    return sorted((figure for figure in figures if is_mean(figure)), key=lambda figure: figure.key)


def is_mean(figure: Figure) -> bool:
    """Whether a metric is the mean score of a reward role."""
    return figure.of is Of.REWARD and figure.name == "mean" and not figure.part
