"""Scores reach the gradient: how differences between dry runs are compared."""

import pytest
import torch
from dry_run_rows import push, record, rows, update_of
from hypothesis import given, settings
from hypothesis import strategies as st

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.runs.proof import score_claims
from rlflow.runs.proof.dry_run import ScoredRows, uneven


def test_differences_cover_only_rows_scored_in_both_dry_runs():
    one, other = rows([[5], [6], [7]]), rows([[5], [6], [8]])
    first, second = (((i, 0), ((i,), (token,))) for i, token in ((0, 5), (1, 6)))
    change = score_claims._change(
        "reward",
        (record([1.0, 2.0, 3.0], one), push(one, [1.0, 1.0, 1.0])),
        (record([2.0, 0.0, 3.0], other), push(other, [5.0, 0.5, 9.0])),
    )
    assert change == ({first: 1.0, second: -2.0}, {first: 4.0, second: -0.5})
    elsewhere = rows([[1], [2]])
    assert (
        score_claims._change(
            "reward",
            (record([1.0, 2.0], elsewhere), push(one, [1.0] * 3)),
            (record([0.0, 1.0], elsewhere), push(one, [2.0] * 3)),
        )
        is None
    )
    unpushed = score_claims._change(
        "reward",
        (record([1.0, 2.0, 3.0], one), push(elsewhere, [1.0, 1.0])),
        (record([2.0, 3.0, 3.0], one), push(one.rows(torch.tensor([0])), [3.0])),
    )
    assert unpushed == (
        {first: 1.0, second: 1.0, ((2, 0), ((2,), (7,))): 0.0},
        {first: 3.0, second: 0.0, ((2, 0), ((2,), (7,))): 0.0},
    )


def samples(tokens, each, start=0):
    """Return rows with one token each, of prompts with ``each`` samples; all prompts have other tokens."""
    batch = Batch.of(
        prompt_tokens=[[i // each] for i in range(len(tokens))],
        tokens=[[token] for token in tokens],
        mask=[[True]] * len(tokens),
    )
    return Batch(Axis.fresh(len(tokens) // each, start).repeat(each), batch.data)


def test_samples_with_equal_tokens_keep_their_own_scores_and_gradient_directions():
    scored = samples([5, 5, 6], 3)
    trained = Batch(Axis.join([scored.axis]), scored.data)  # a joined row's path begins with its own
    change = score_claims._change(
        "reward",
        (record([0.0, 0.0, 0.0], scored), push(trained, [0.0, 0.0, 0.0])),
        (record([1.0, 2.0, 3.0], scored), push(trained, [-1.0, 0.0, 1.0])),
    )
    assert [sorted(side.values()) for side in change] == [[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]]
    assert score_claims._correlation([change]) == pytest.approx(2 / 28**0.5)


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 1), min_size=4, max_size=4), min_size=2, max_size=4),
    st.integers(0, 1000),
)
def test_a_group_baseline_is_never_found_to_oppose_its_scores(drawn, seed):
    """A sharp model gives most samples of a prompt the same tokens."""
    batch = samples([token for group in drawn for token in group], 4, seed)
    scores = [uneven(number)("reward", batch.axis) for number in range(3)]
    pushes = [(one.view(-1, 4) - one.view(-1, 4).mean(1, keepdim=True)).flatten() for one in scores]
    runs = [
        (record(score.tolist(), batch), push(batch, toward.tolist()))
        for score, toward in zip(scores, pushes, strict=True)
    ]
    changes = [score_claims._change("reward", runs[0], other) for other in runs[1:]]
    assert score_claims._correlation(changes) > 0.5


def test_gradient_directions_correlate_with_scores_over_all_sets():
    up = ({1: 1.0, 2: -1.0}, {1: 2.0, 2: -2.0})
    down = ({1: 1.0, 2: -1.0}, {1: -2.0, 2: 2.0})
    aside = ({1: 1.0, 2: 1.0}, {1: 3.0, 2: -3.0})
    assert score_claims._correlation([up]) == pytest.approx(1.0)
    assert score_claims._correlation([down, down]) == pytest.approx(-1.0)
    assert score_claims._correlation([up, down]) == score_claims._correlation([aside]) == pytest.approx(0.0)


def test_scores_are_reversed_in_the_first_group_or_two_rows():
    for axis, first in ((Axis.fresh(2).repeat(3), 3), (Axis.fresh(4), 2), (Axis.fresh(3).repeat(1), 2)):
        before, after = uneven(0)("reward", axis), score_claims._first_reversed("reward")("reward", axis)
        assert after[:first].tolist() == before[:first].flip(0).tolist()
        assert torch.equal(after[first:], before[first:])
        assert not torch.equal(after, before)
        assert torch.equal(score_claims._first_reversed("other")("reward", axis), before)


def test_a_gradient_direction_is_located_by_the_path_of_its_rows():
    batch = rows([[5], [6]], Axis.fresh(1, start=7).repeat(2))
    assert score_claims._direction_by_place(push(batch, [1.0, 2.0])) == {(7, 0): 1.0, (7, 1): 2.0}


def test_an_update_is_matched_with_the_scored_rows_it_uses():
    prompts = Axis.fresh(2)
    sampled = rows([[5], [6], [7], [8]], prompts.repeat(2))
    scored, update = (
        [ScoredRows("reward", sampled, torch.zeros(4))],
        update_of(sampled.rows(torch.tensor([0, 3]))),
    )
    assert score_claims._about(update, scored)
    again = update_of(rows([[5], [6], [7], [8]], prompts.repeat(2)))
    assert not score_claims._about(again, scored)
    joined = Axis.join([sampled.axis])
    assert score_claims._about(update_of(Batch(joined, sampled.data)), scored)
    assert not score_claims._about(update_of(rows([[1], [2], [3], [4]], joined)), scored)


def test_a_score_range_other_than_1_is_shown():
    assert (score_claims._times(1.0), score_claims._times(-100.0)) == ("", " from 0 to -100")
