"""Measures of a run, compared with values computed by hand."""

import math

import pytest
from keyed import figures

from rlflow.author.figures import Figure, Of
from rlflow.monitoring.diagnosis.evidence import (
    MEASURES,
    Evidence,
    clipped,
    drift,
    early,
    improvement,
    last_third,
    late,
    moved,
    moving,
    odds,
    place,
    skipped,
    used,
)


def run(settings=None, **series):
    """Make a run from the values of each metric; __ stands for / and a leading u for the policy's update."""
    length = max(map(len, series.values()))
    named = {name.replace("__", "/"): values for name, values in series.items()}
    lines = ({name: values[i] for name, values in named.items() if i < len(values)} for i in range(length))
    return Evidence([(i, figures(line)) for i, line in enumerate(lines)], settings or {})


def test_halves_and_thirds_are_measured():
    series = [(i, float(i)) for i in range(12)]
    assert [number for number, _ in late(series)] == [6, 7, 8, 9, 10, 11]
    assert [number for number, _ in early(series)] == [0, 1, 2]
    assert [number for number, _ in early([(i, 0.0) for i in range(40)])] == [0, 1, 2, 3]
    assert [number for number, _ in last_third(series)] == [8, 9, 10, 11]
    assert early(series[:2]) == last_third(series[:2]) == series[:2]


def test_the_figure_of_one_role_is_found_consistently():
    whole = run(
        solver__policy__kl_sampler=[1.0, 2.0],
        judge__policy__kl_sampler=[5.0, 6.0],
        mine__kl_sampler=[7.0, 8.0],
    )
    assert whole.series((Of.ROWS, "policy/kl_sampler")) == [(0, 1.0), (1, 2.0)]
    assert whole.series((Of.STAGE, "kl_sampler")) == [(0, 7.0), (1, 8.0)]
    assert whole.series((Of.ROWS, "kl_sampler")) == []


def test_scores_are_measured_relative_to_their_range():
    whole = run(
        reward__missing=[0.0] * 6,
        reward__mean=[2.0, 2.0, 2.0, 3.0, 3.0, 3.0],
        reward__lowest=[1.0] * 6,
        reward__highest=[5.0] * 6,
    )
    assert place(whole) == 0.25
    assert improvement(whole) == 0.25
    alike = run(
        reward__missing=[0.0] * 6, reward__mean=[1.0] * 6, reward__lowest=[1.0] * 6, reward__highest=[1.0] * 6
    )
    assert (place(alike), improvement(alike)) == (1.0, 0.0)
    assert (place(run(loss=[1.0])), improvement(run(loss=[1.0]))) == (None, None)


def update(**values):
    return {f"actor.update__{name}": value for name, value in values.items()}


def test_clipping_is_measured_over_tokens_with_a_signal():
    whole = run(
        **update(
            funnel__moved=[0.1, 0.3],
            funnel__tokens=[100.0, 100.0],
            funnel__tokens_with_gradient=[60.0, 60.0],
            funnel__tokens_clipped_above=[15.0, 15.0],
            funnel__tokens_clipped_below=[5.0, 5.0],
            steps=[4.0, 4.0],
        )
    )
    assert clipped(whole) == 0.25
    assert moved(whole) == pytest.approx(0.2)
    assert moving(whole) == 0.6
    once = run(**update(funnel__moved=[0.0, 0.0], steps=[1.0, 1.0]))
    assert moved(once) is None  # not measured: the run made one step only
    assert moved(run(**update(funnel__moved=[0.0, 2e-6], steps=[1.0, 1.0]))) == pytest.approx(1e-6)
    assert clipped(once) is None


def test_measures_of_a_critic_are_not_used_for_the_policy():
    whole = run(
        **{"critic.update__funnel__tokens": [10.0], "critic.update__funnel__tokens_with_gradient": [10.0]},
        **update(funnel__moved=[0.1], funnel__tokens=[10.0], funnel__tokens_with_gradient=[4.0]),
    )
    assert moving(whole) == 0.4


def test_shares_of_rows_and_steps_and_the_drift_are_measured():
    assert used(run(funnel__rows_sampled=[8.0, 8.0], funnel__rows_used=[8.0, 2.0])) == 0.25
    assert skipped(run(**update(steps=[3.0, 3.0], skipped_steps=[1.0, 1.0]))) == 0.25
    assert drift(run(policy__mismatch_mean=[1e-6, 1e-3, 1e-3])) == pytest.approx(1000)
    # exact at first: measured against rounding
    assert drift(run(policy__mismatch_mean=[0.0, 1e-3])) == pytest.approx(1e4)


def test_the_odds_under_a_kl_charge_are_those_of_the_best_policy():
    scores = {"reward__lowest": [0.0, 0.0], "reward__highest": [1.0, 1.0]}
    assert odds(run({"hp.beta": 2.0}, **scores)) == pytest.approx(math.exp(0.5))
    assert odds(run({"hp.beta": 0.0}, **scores)) is None
    assert odds(run({}, **scores)) is None


def test_no_measure_fails_on_an_empty_run():
    for evidence in (Evidence([]), Evidence([(0, {})], {"hp.beta": "much", "staleness": None})):
        known = {
            name: measure(evidence) for name, measure in MEASURES.items() if measure(evidence) is not None
        }
        assert known == ({"uneven": 1.0} if evidence.iterations else {})  # it has no groups


def test_several_rewards_use_mean_place_and_largest_improvement():
    def figure(of, name, reward):
        return Figure(of, name, reward, reward) if of is Of.REWARD else Figure(of, name, part=reward)

    ends = {
        figure(Of.SCORES, name, reward): value
        for reward in ("task", "style")
        for name, value in (("lowest", 0.0), ("highest", 1.0))
    }
    means = ((0.0, 0.5), (0.0, 0.5), (0.0, 0.5), (1.0, 0.5), (1.0, 0.5), (1.0, 0.5))
    lines = [
        ends | {figure(Of.REWARD, "mean", "task"): task, figure(Of.REWARD, "mean", "style"): style}
        for task, style in means
    ]
    for several in (lines, [dict(reversed(line.items())) for line in lines]):
        whole = Evidence(list(enumerate(several)))
        assert sorted(whole.rewards) == ["style", "task"]
        assert (place(whole), improvement(whole)) == (0.25, 1.0)
