"""Names in the trackers are those of the field."""

import math

import pytest

from rlflow.watch.names import TABLE, accuracies, own_metrics, renamed


@pytest.mark.parametrize(("name", "known"), [
    ("actor.update/clipped", "actor/pg_clipfrac"), ("actor.update/loss", "actor/pg_loss"), ("actor.update/grad_norm", "actor/grad_norm"),
    ("actor.update/lr", "actor/lr"), ("critic.update/loss", "critic/vf_loss"), ("critic.update/clipped", "critic/vf_clipfrac"),
    ("actor.update#2/loss", "actor#2/pg_loss"), ("student.update/loss", "student/loss"), ("reward/mean", "critic/score/mean"),
    ("response/length", "response_length/mean"), ("response/truncated", "response_length/clip_ratio"), ("seconds", "timing_s/step"),
    ("policy/entropy", "actor/entropy"), ("critic/explained_variance", "critic/vf_explained_var"), ("evaluation/sampled", "val/accuracy"),
    ("gae/own", "gae/own"), ("beta", "beta"),
])  # fmt: skip
def test_a_metric_has_the_name_that_dashboards_know(name, known):
    assert renamed({name: 1.0}) == {known: 1.0}


def test_rewards_of_several_roles_and_parts_have_names_of_their_own():
    metrics = {"reward_0/mean": 1.0, "reward_0/missing": 0.0, "reward_1/mean": 2.0, "reward_1/missing": 0.0, "gae/mean": 3.0,
               "reward/mean": 0.5, "reward/missing": 0.0, "reward/math_mean": 0.25}  # fmt: skip
    found = renamed(metrics)
    assert found["rewards/reward_0/mean"] == 1.0
    assert found["rewards/reward_1/mean"] == 2.0
    assert found["rewards/math/mean"] == 0.25
    assert found["critic/score/mean"] == 0.5
    assert found["gae/mean"] == 3.0


def test_what_is_not_finite_is_left_out():
    assert renamed({"a": math.nan, "b": math.inf, "c": None, "d": 1.0}) == {"d": 1.0}


def test_two_metrics_never_share_a_name():
    metrics = {"actor.update/grad_norm": 1.0, "actor/grad_norm": 2.0, "reward/mean": 3.0, "critic/score/mean": 4.0}
    assert renamed(metrics) == metrics
    assert len(set(TABLE.values())) == len(TABLE)


def test_an_evaluation_of_several_roles_is_read_by_role_and_that_of_one_without():
    one = {"evaluation/sampled": 0.25, "evaluation/greedy": 0.5}
    assert accuracies(one) == {"sampled": 0.25, "greedy": 0.5}
    assert accuracies({**one, "evaluation/solver/sampled": 0.25, "evaluation/verifier/sampled": 0.75}) == {
        "solver sampled": 0.25, "verifier sampled": 0.75}


def test_own_metrics_are_those_of_the_authors_stages():
    computed = {"judge/mean", "judge/missing", "judge/missing_none", "actor.update/loss", "actor.sync/bytes", "fates/trained", "seconds",
                "policy/entropy", "response/length", "critic/explained_variance", "evaluation/sampled", "canary/actor_max"}  # fmt: skip
    assert own_metrics([*computed, "compare/spread", "gae/clipped_max"]) == ["compare/spread", "gae/clipped_max"]
