"""Claims about a flow's own text: which claims a sound flow has, and how each is checked."""

import contextlib
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import prepared

from rlflow import loss
from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.runs.proof import flow_claims
from rlflow.runs.proof.directions import Direction, learned_rows, pushed
from rlflow.runs.proof.dry_run import DryRunRecord, RecordedUpdate, ScoredRows, uneven
from rlflow.runs.proof.flow_claims import FlowClaims
from rlflow.runs.proving import dry_runs
from rlflow.training.objective import New

OF_EVERY_UPDATE = ("padding", "holes")
SOUND = {
    "grpo": [
        ("reward-reaches", "reward"),
        *(
            (name, "actor.update")
            for name in ("reward-direction", "reward-place", "gradient", "columns", *OF_EVERY_UPDATE)
        ),
    ],
    "dpo": [(name, "actor.update") for name in ("gradient", "columns", "chosen-direction", *OF_EVERY_UPDATE)],
    "sft": [(name, "actor.update") for name in ("gradient", "given-direction", *OF_EVERY_UPDATE)],
}
NUMBERS = {
    "columns": "3 policies, 3 sizes, both signs",
    "padding": "gradients differ by 0",
    "holes": "gradients differ by 0",
}


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_flow_proves_all_claims(proven, name):
    claims = proven(
        name,
        flow_only=True,
        **({"hp.max_tokens": 4, "hp.samples": 4, "prompts": 4} if name == "grpo" else {"prompts": 4}),
    )
    assert [(claim.name, claim.subject) for claim in claims] == SOUND[name]
    assert {claim.verdict for claim in claims} == {"proved"}
    assert all(claim.place is not None and claim.place.path.endswith(f"{name}.py") for claim in claims)
    numbers = {claim.name: claim.number for claim in claims}
    assert all(numbers[each] == number for each, number in NUMBERS.items() if each in numbers)
    if name == "grpo":
        assert numbers["reward-reaches"].startswith("6 sets of scores; gradients differ by up to ")
        assert numbers["reward-direction"].endswith(" over 5 other sets of scores")
        assert numbers["reward-place"].endswith(" for these rows, by 0 for others")


def rows(tokens, axis=None, **more):
    """Return rows of one prompt token each; the token is the row's number."""
    batch = Batch.of(
        prompt_tokens=[[i] for i in range(len(tokens))],
        tokens=tokens,
        mask=[[True] * len(row) for row in tokens],
        **more,
    )
    return batch if axis is None else Batch(axis, batch.data)


@loss
def gain(new, advantages):
    return -new.logprobs * advantages


@loss
def priced(new, advantages, costs):
    return -new.logprobs * advantages + costs


def _update(batch, one=gain):
    return RecordedUpdate("actor.update", "actor", batch, one, {}, 0)


def record(scores, batch, node="reward"):
    return DryRunRecord(scored=[ScoredRows(node, batch, torch.tensor(scores))])


def push(batch, of_rows):
    return Direction(batch, {"scores": torch.tensor(of_rows)})


TWO_PARTS = """
from rlflow import compare, flow, loss, stage

@stage(pure=False)
def noted(scores):
    raise AssertionError("a rehearsal calls no stage with side effects")

@loss
def gain(new, logprobs, advantages):
    return -(new.logprobs - logprobs).exp() * advantages

@flow
def parts(prompts, actor, reward, judge):
    batch = actor.generate(prompts, samples=4, max_tokens=4)
    batch |= reward(batch)
    second = batch | judge(batch)
    batch |= actor.logprobs(batch)
    batch |= compare(batch)
    actor.update(batch, gain)
    noted(second)
    second |= actor.logprobs(second)
    second |= compare(second)
    actor.update(second, gain)
"""


def test_a_dry_run_ends_before_a_stage_with_side_effects(tmp_path):
    (tmp_path / "parts.py").write_text(TWO_PARTS)
    with contextlib.closing(
        prepared(tmp_path, str(tmp_path / "parts.py"), backend="null", prompts=4, reward=("task", "task"))
    ) as context:
        claims = list(FlowClaims(dry_runs(context)).claims())
    assert (
        str(claims[0])
        == f"unproved   parts: stage 'noted' has side effects ({tmp_path / 'parts.py'}:20; the dry run "
        "stops before it)"
    )
    verdicts = {(claim.name, claim.subject): claim.verdict for claim in claims}
    assert verdicts["reward-direction", "actor.update"] == "proved"
    assert verdicts["reward-reaches", "judge"] == "unproved"  # its scores are learned from later
    assert "actor.update#2" not in {claim.subject for claim in claims}
    assert "falsified" not in verdicts.values()


def test_differences_cover_only_rows_scored_in_both_dry_runs():
    one, other = rows([[5], [6], [7]]), rows([[5], [6], [8]])
    first, second = (((i, 0), ((i,), (token,))) for i, token in ((0, 5), (1, 6)))
    change = flow_claims._change(
        "reward",
        (record([1.0, 2.0, 3.0], one), push(one, [1.0, 1.0, 1.0])),
        (record([2.0, 0.0, 3.0], other), push(other, [5.0, 0.5, 9.0])),
    )
    assert change == ({first: 1.0, second: -2.0}, {first: 4.0, second: -0.5})
    elsewhere = rows([[1], [2]])
    assert (
        flow_claims._change(
            "reward",
            (record([1.0, 2.0], elsewhere), push(one, [1.0] * 3)),
            (record([0.0, 1.0], elsewhere), push(one, [2.0] * 3)),
        )
        is None
    )
    unpushed = flow_claims._change(
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
    change = flow_claims._change(
        "reward",
        (record([0.0, 0.0, 0.0], scored), push(trained, [0.0, 0.0, 0.0])),
        (record([1.0, 2.0, 3.0], scored), push(trained, [-1.0, 0.0, 1.0])),
    )
    assert [sorted(side.values()) for side in change] == [[1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]]
    assert flow_claims._correlation([change]) == pytest.approx(2 / 28**0.5)


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
    changes = [flow_claims._change("reward", runs[0], other) for other in runs[1:]]
    assert flow_claims._correlation(changes) > 0.5


def test_gradient_directions_correlate_with_scores_over_all_sets():
    up = ({1: 1.0, 2: -1.0}, {1: 2.0, 2: -2.0})
    down = ({1: 1.0, 2: -1.0}, {1: -2.0, 2: 2.0})
    aside = ({1: 1.0, 2: 1.0}, {1: 3.0, 2: -3.0})
    assert flow_claims._correlation([up]) == pytest.approx(1.0)
    assert flow_claims._correlation([down, down]) == pytest.approx(-1.0)
    assert flow_claims._correlation([up, down]) == flow_claims._correlation([aside]) == pytest.approx(0.0)


def test_scores_are_reversed_in_the_first_group_or_two_rows():
    for axis, first in ((Axis.fresh(2).repeat(3), 3), (Axis.fresh(4), 2), (Axis.fresh(3).repeat(1), 2)):
        before, after = uneven(0)("reward", axis), flow_claims._first_reversed("reward")("reward", axis)
        assert after[:first].tolist() == before[:first].flip(0).tolist()
        assert torch.equal(after[first:], before[first:])
        assert not torch.equal(after, before)
        assert torch.equal(flow_claims._first_reversed("other")("reward", axis), before)


def test_a_gradient_direction_is_located_by_the_path_of_its_rows():
    batch = rows([[5], [6]], Axis.fresh(1, start=7).repeat(2))
    assert flow_claims._direction_by_place(push(batch, [1.0, 2.0])) == {(7, 0): 1.0, (7, 1): 2.0}


def test_an_update_is_matched_with_the_scored_rows_it_uses():
    prompts = Axis.fresh(2)
    sampled = rows([[5], [6], [7], [8]], prompts.repeat(2))
    scored, update = (
        [ScoredRows("reward", sampled, torch.zeros(4))],
        _update(sampled.rows(torch.tensor([0, 3]))),
    )
    assert flow_claims._about(update, scored)
    again = _update(rows([[5], [6], [7], [8]], prompts.repeat(2)))
    assert not flow_claims._about(again, scored)
    joined = Axis.join([sampled.axis])
    assert flow_claims._about(_update(Batch(joined, sampled.data)), scored)
    assert not flow_claims._about(_update(rows([[1], [2], [3], [4]], joined)), scored)


def test_rows_of_three_tokens_get_their_second_token_masked_out():
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]], dtype=torch.bool)
    assert flow_claims._with_holes(mask).int().tolist() == [[1, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 1]]
    assert mask.all(1).tolist() == [True, False, False]


def test_a_loss_is_evaluated_one_large_step_up_and_one_down(grpo):
    update = learned_rows(grpo.base.updates[0])
    here, (up, down) = grpo.new(update).logprobs, grpo.far(update)
    assert torch.equal(up.logprobs, flow_claims._step("logprobs", here, 1))
    assert torch.equal(down.logprobs, flow_claims._step("logprobs", here, -1))


def test_rows_too_short_for_masking_have_no_masking_claim(grpo):
    update = _update(rows([[5, 6], [7]], advantages=[[1.0, 2.0], [3.0]]))
    found = list(grpo.beyond(update, pushed(update, grpo.new(update))))
    assert [(claim.name, claim.verdict) for claim in found] == [("padding", "proved"), ("holes", "unproved")]


def test_a_large_step_is_uneven_and_leaves_log_probs_below_zero():
    up, down = (flow_claims._step("values", torch.zeros(2, 2), sign) for sign in (1, -1))
    assert torch.allclose(up, torch.linspace(0.2, 1.0, 4).reshape(2, 2))
    assert torch.equal(down, -up)
    assert float(flow_claims._step("logprobs", torch.full((2, 2), -0.1), 1).max()) == pytest.approx(-1e-6)
    assert flow_claims._step("logprobs", torch.full((1,), -3.0), 1).tolist() == pytest.approx([-2.8])


def test_a_score_range_other_than_1_is_shown():
    assert (flow_claims._times(1.0), flow_claims._times(-100.0)) == ("", " from 0 to -100")


def test_columns_differ_by_gradient_or_by_value_alone():
    batch = rows([[5, 5], [6]], advantages=[[1.0, 2.0], [3.0]], costs=[[1.0, 1.0], [1.0]])
    update, new = _update(batch, priced), New(logprobs=torch.full((2, 2), -1.0))
    assert flow_claims._differ(update, new, {"advantages": batch["advantages"] + 1})
    assert flow_claims._differ(update, new, {"costs": batch["costs"] + 1})
    assert not flow_claims._differ(update, new, {"costs": batch["costs"]})


def test_the_most_changed_update_must_differ_far_enough(grpo):
    batch = rows([[5], [6]], advantages=[[1.0], [2.0]])
    one, near, far = (push(batch, values) for values in ([1.0, 1.0], [1.0, 1.001], [-1.0, 1.0]))
    grpo.rescored = [(DryRunRecord([_update(batch)]), {"actor.update": near})]
    assert grpo.furthest("actor.update", one) is None
    assert grpo.furthest("actor.update", None) is None
    grpo.rescored += [
        (DryRunRecord([replace(_update(batch), call=7)]), {"actor.update": far}),
        (DryRunRecord(), {}),
    ]
    assert grpo.furthest("actor.update", one).call == 7
    assert grpo.furthest("critic.update", one) is None


def test_a_dry_run_without_rows_is_unproved_with_its_reason(grpo):
    batch = rows([[5], [6]], advantages=[[1.0], [2.0]])
    empty = DryRunRecord([_update(batch.rows(torch.zeros(0, dtype=torch.int64)))])
    assert grpo.directions(empty) == {}
    assert grpo.directions(DryRunRecord([_update(batch)])).keys() == {"actor.update"}
    grpo._base = DryRunRecord(skipped="no group was kept")
    (claim,) = grpo.claims()
    assert (claim.name, claim.verdict, claim.number) == ("rehearsed", "unproved", "no group was kept")
