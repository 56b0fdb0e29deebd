"""Names in the trackers are the common names of the field."""

import math

import pytest
from keyed import figures

from rlflow.monitoring.metric_names import TABLE, accuracies, change, own_metrics, renamed, share


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("actor.update/clipped", "actor/pg_clipfrac"),
        ("actor.update/loss", "actor/pg_loss"),
        ("actor.update/grad_norm", "actor/grad_norm"),
        ("actor.update/lr", "actor/lr"),
        ("critic.update/loss", "critic/vf_loss"),
        ("critic.update/clipped", "critic/vf_clipfrac"),
        ("actor.update#2/loss", "actor#2/pg_loss"),
        ("student.update/loss", "student/loss"),
        ("reward/mean", "critic/score/mean"),
        ("response/length", "response_length/mean"),
        ("response/truncated", "response_length/clip_ratio"),
        ("seconds", "timing_s/step"),
        ("policy/entropy", "actor/entropy"),
        ("critic/explained_variance", "critic/vf_explained_var"),
        ("evaluation/sampled", "val/accuracy"),
        ("solver/policy/entropy", "solver/actor/entropy"),
        ("solver/response/length", "solver/response_length/mean"),
        ("gae/own", "gae/own"),
        ("beta", "beta"),
    ],
)
def test_a_metric_has_its_common_name(name, known):
    assert renamed(figures({name: 1.0})) == {known: 1.0}


def test_rewards_of_several_roles_and_parts_have_names_of_their_own():
    metrics = {
        "reward_0/mean": 1.0,
        "reward_0/missing": 0.0,
        "reward_1/mean": 2.0,
        "reward_1/missing": 0.0,
        "gae/mean": 3.0,
        "reward/mean": 0.5,
        "reward/missing": 0.0,
        "reward/math_mean": 0.25,
    }
    found = renamed(figures(metrics))
    assert found["rewards/reward_0/mean"] == 1.0
    assert found["rewards/reward_1/mean"] == 2.0
    assert found["rewards/math/mean"] == 0.25
    assert found["critic/score/mean"] == 0.5
    assert found["gae/mean"] == 3.0


def test_non_finite_values_are_skipped():
    assert renamed(figures({"a": math.nan, "b": math.inf, "c": None, "d": 1.0})) == {"d": 1.0}


def test_two_metrics_never_share_a_name():
    metrics = {
        "actor.update/grad_norm": 1.0,
        "actor/grad_norm": 2.0,
        "reward/mean": 3.0,
        "critic/score/mean": 4.0,
    }
    assert renamed(figures(metrics)) == metrics
    assert len(set(TABLE.values())) == len(TABLE)


def test_evaluations_of_several_roles_are_read_by_role():
    one = {"evaluation/sampled": 0.25, "evaluation/greedy": 0.5}
    assert accuracies(figures(one)) == {"sampled": 0.25, "greedy": 0.5}
    assert accuracies(
        figures({**one, "evaluation/solver/sampled": 0.25, "evaluation/verifier/sampled": 0.75})
    ) == {"solver sampled": 0.25, "verifier sampled": 0.75}


def test_figures_of_other_sets_are_read_by_set():
    plain = {"evaluation/sampled": 0.25, "evaluation/pass@2": 0.5, "evaluation/sampled/gsm8k": 0.5}
    sets = {
        "evaluation/math/prompts": 9.0,
        "evaluation/math/sampled": 0.125,
        "evaluation/math/maj@4": 0.75,
        "evaluation/math/mean@4": 1.5,
        "evaluation/math/one/sampled": 0.5,
    }
    assert list(accuracies(figures({**plain, **sets})).items()) == [
        ("sampled", 0.25),
        ("pass@2", 0.5),
        ("sampled gsm8k", 0.5),
        ("math sampled", 0.125),
        ("math maj@4", 0.75),
        ("math mean@4", 1.5),
        ("math one sampled", 0.5),
    ]
    assert list(
        accuracies(
            figures(
                {
                    "evaluation/sampled": 0.5,
                    "evaluation/one/sampled": 0.5,
                    "evaluation/math/prompts": 9.0,
                    "evaluation/math/greedy": 1.0,
                }
            )
        )
    ) == ["one sampled", "math greedy"]
    assert renamed(
        figures(
            sets
            | {"evaluation/math/greedy": 0.0, "evaluation/math/pass@4": 0.0, "evaluation/one/sampled": 0.5}
        )
    ) == {
        "evaluation/math/prompts": 9.0,
        "val/math/accuracy": 0.125,
        "val-core/math/acc/maj@4/mean": 0.75,
        "val-core/math/acc/mean@4": 1.5,
        "evaluation/math/one/sampled": 0.5,
        "val/math/accuracy_greedy": 0.0,
        "val-core/math/acc/best@4/mean": 0.0,
        "evaluation/one/sampled": 0.5,
    }
    assert ([share(value) for value in (0.5, 1.5)], change(0.25, 0.5), change(0.5, 2.0)) == (
        ["50.0%", "1.5"],
        "+25.0 points",
        "+1.5",
    )


def test_own_metrics_come_from_the_authors_stages():
    computed = {
        "judge/mean",
        "judge/missing",
        "judge/missing_none",
        "actor.update/loss",
        "actor.sync/bytes",
        "fates/trained",
        "seconds",
        "policy/entropy",
        "response/length",
        "critic/explained_variance",
        "evaluation/sampled",
        "canary/actor_max",
    }
    every = figures(dict.fromkeys([*computed, "compare/spread", "gae/clipped_max"], 1.0))
    assert [figure.key for figure in own_metrics(every)] == ["compare/spread", "gae/clipped_max"]
