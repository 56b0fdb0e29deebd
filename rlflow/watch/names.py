"""The names of metrics in trackers: rlflow's names as verl and TRL would call them, so that dashboards for these work.

    rlflow                          tracker
    actor.update/loss               actor/pg_loss; critic.update/loss is critic/vf_loss, of another role ROLE/loss
    actor.update/clipped            actor/pg_clipfrac; critic.update/clipped is critic/vf_clipfrac
    ROLE.update/NAME                ROLE/NAME, a second update line of the role ROLE#2/NAME
    reward/mean                     critic/score/mean; of another reward role rewards/ROLE/mean
    reward/NAME_mean                rewards/NAME/mean: one of several weighted rewards
    evaluation/SET/FIGURE           of a set of --eval: val/SET/accuracy and val/SET/accuracy_greedy; mean@n, pass@k and maj@k are
                                    val-core/SET/acc/mean@n, …/best@k/mean, …/maj@k/mean
    the rest                        the table below; any other name stays as it is

A node's seconds are timing_s/NODE. Steps count finished iterations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

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
SCORE = "evaluation/score"  # the mean score of the rows that a flow's own evaluation returns
PROMPTS = "prompts"  # how many prompts a set of --eval has: a figure that every set has, and nothing else
FIGURE = re.compile(r"sampled|greedy|(?:mean|pass|maj)@\d+")  # a figure of an evaluation
OF_SETS = {"sampled": "val/{}/accuracy", "greedy": "val/{}/accuracy_greedy", "mean": "val-core/{}/acc/mean@{}",
           "pass": "val-core/{}/acc/best@{}/mean", "maj": "val-core/{}/acc/maj@{}/mean"}  # fmt: skip
COMPUTED = ("evaluation", "fates", "funnel", "policy", "response", "reward", "canary")  # heads of metrics that any run may have
OF_A_ROLE = re.compile("(?:policy|critic|response|reward|scores|funnel)/")  # begins what follows the role's name where several are trained
UPDATE = re.compile(r"(?P<role>[^/]+)\.update(?P<line>#\d+)?/(?P<name>.+)")
POLICY = {"loss": "pg_loss", "clipped": "pg_clipfrac", "kl": "ppo_kl"}
VALUE = {"loss": "vf_loss", "clipped": "vf_clipfrac"}
HABITS = {"actor": POLICY, "policy": POLICY, "critic": VALUE, "value": VALUE}  # by the role's name; other roles may train anything


def renamed(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """The finite metrics under the trackers' names. A metric keeps its name where the tracker's name would stand for two metrics."""
    rewards, sets = reward_roles(metrics), evaluation_sets(metrics)
    renamed_metrics: dict[str, float] = {}
    for name, value in metrics.items():
        if value is not None and math.isfinite(value):
            tracker_name = tracked(name, rewards, sets)
            renamed_metrics[name if tracker_name in renamed_metrics or tracker_name in metrics else tracker_name] = float(value)
    return renamed_metrics


def tracked(name: str, rewards: Iterable[str] = (), sets: Iterable[str] = ()) -> str:
    """The name of a metric in trackers. ``rewards``: names of the reward roles; ``sets``: of the sets of --eval."""
    if name in TABLE:
        return TABLE[name]
    if (parts := name.split("/"))[0] == "evaluation" and len(parts) == 3 and parts[1] in sets and FIGURE.fullmatch(parts[2]):
        figure, _, count = parts[2].partition("@")
        return OF_SETS[figure].format(parts[1], count)
    update = UPDATE.fullmatch(name)
    if update:
        role, line = update["role"], update["line"] or ""
        return f"{role}{line}/{HABITS.get(role, {}).get(update['name'], update['name'])}"
    head, _, last = name.partition("/")
    if last in TABLE:  # of one of several trained roles
        return f"{head}/{TABLE[last]}"
    if head in rewards and last == "mean":
        return f"rewards/{head}/mean"
    if head in rewards and last.endswith("_mean"):
        return f"rewards/{last.removesuffix('_mean')}/mean"
    return name


def accuracies(evaluation: Mapping[str, float]) -> dict[str, float]:
    """The shares of an evaluation by what a reader sees: ``sampled`` and ``greedy``, or where several roles are evaluated ``ROLE sampled``
    and so on; after these the shares by source of data, ``sampled SOURCE``, and those of each set of --eval, ``SET sampled``. Without the
    mean score of a flow's own evaluation."""
    sets = evaluation_sets(evaluation)
    shares = [name for name in evaluation if name != SCORE and not name.endswith(f"/{PROMPTS}")]
    first = {name: name.removeprefix("evaluation/").partition("/")[0] for name in shares if name.count("/") > 1}
    of_sets = [name for name, part in first.items() if part in sets]
    by_source = [name for name, part in first.items() if FIGURE.fullmatch(part)]
    by_role = [name for name in first if name not in (*of_sets, *by_source)]
    plain = [name for name in shares if name not in (*of_sets, *by_source)]
    named = [*(by_role or plain), *(() if by_role else by_source), *of_sets]
    return {name.removeprefix("evaluation/").replace("/", " "): evaluation[name] for name in named}


def evaluation_sets(metrics: Iterable[str]) -> list[str]:
    """The names of the sets of --eval among metrics."""
    return [parts[1] for name in metrics if len(parts := name.split("/")) == 3 and parts[0] == "evaluation" and parts[2] == PROMPTS]


def share(value: float) -> str:
    """A share in per cent; a mean of scores that is none, as a number."""
    return f"{value:.1%}" if 0 <= value <= 1 else f"{value:.3g}"


def change(before: float, after: float) -> str:
    """The difference of two shares in points; of numbers that are none, as a number."""
    shares = all(0 <= value <= 1 for value in (before, after))
    return f"{100 * (after - before):+.1f} points" if shares else f"{after - before:+.3g}"


def own_metrics(metrics: Iterable[str]) -> list[str]:
    """The names of metrics that stages of the algorithm's author give, as ``node/name``, sorted: those that are of no model, of no reward,
    and not computed of every run."""
    heads = {*COMPUTED, *reward_roles(metrics := set(metrics))}
    pairs = ((name, *name.partition("/")[::2]) for name in metrics - set(TABLE))
    return sorted(name for name, head, last in pairs if last and head not in heads and "." not in head and not OF_A_ROLE.match(last))


def reward_roles(metrics: Iterable[str]) -> list[str]:
    """The names of the reward roles among metrics: only rewards have both a mean and a count of missing values."""
    names = set(metrics)
    heads = [name.removesuffix("/mean") for name in names if name.endswith("/mean")]
    return sorted(head for head in heads if f"{head}/missing" in names)
