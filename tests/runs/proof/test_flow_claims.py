"""Claims about a flow's own text: which claims a sound flow has, and how each is checked."""

import contextlib
from dataclasses import replace

import pytest
import torch
from dry_run_rows import push, rows, update_of
from small_runs import prepared

from rlflow import loss
from rlflow.runs.proof import flow_claims
from rlflow.runs.proof.directions import learned_rows, pushed
from rlflow.runs.proof.dry_run import DryRunRecord
from rlflow.runs.proof.flow_claims import FlowClaims
from rlflow.runs.proof.proving import dry_runs
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


@loss
def priced(new, advantages, costs):
    return -new.logprobs * advantages + costs


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


SCHEDULED = """
from rlflow import flow, group_mean, loss, stage
import torch

@loss
def gain(new, advantages):
    return -new.logprobs * advantages, {}

@stage(gives="advantages", rows="group")
def centre(scores, group, mask, ref_logprobs=None):
    shift = SHIFT
    return torch.where(mask, (scores - group_mean(scores, group))[:, None] + 0 * shift, 0.0)

@flow
def now_and_then(prompts, actor, reference, reward):
    batch = actor.generate(prompts, samples=4, max_tokens=4)
    batch |= reward(batch)
    batch |= reference.logprobs(batch, gives="ref_logprobs", every=2, after=1)
    batch |= centre(batch)
    actor.update(batch, gain, every=3)
"""


@pytest.mark.parametrize(
    ("shift", "verdict"),
    # `check` calls the stage with four rows, and finds nothing
    [("0.0", "proved"), ("0.0 if len(scores) < 5 else ref_logprobs.mean()", "falsified")],
    ids=["right", "wrong"],
)
def test_every_set_of_calls_that_are_due_together_is_rehearsed(tmp_path, shift, verdict):
    (tmp_path / "due.py").write_text(SCHEDULED.replace("SHIFT", shift))
    with contextlib.closing(
        prepared(tmp_path, str(tmp_path / "due.py"), backend="null", prompts=4, prove="off")
    ) as context:
        claims = [claim for claim in FlowClaims(dry_runs(context)).claims() if claim.name == "schedules"]
    # three of the four sets have a call that isn't due; in two of them, the reference is
    lacking = {claim.sentence.partition("without ")[2]: claim.verdict for claim in claims}
    assert lacking == {
        "reference.logprobs": verdict,
        "actor.update, reference.logprobs": verdict,
        "actor.update": "proved",
    }
    assert all(("NoneType" in claim.number) == (claim.verdict == "falsified") for claim in claims)


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
    update = update_of(rows([[5, 6], [7]], advantages=[[1.0, 2.0], [3.0]]))
    found = list(grpo.beyond(update, pushed(update, grpo.new(update))))
    assert [(claim.name, claim.verdict) for claim in found] == [("padding", "proved"), ("holes", "unproved")]


def test_a_large_step_is_uneven_and_leaves_log_probs_below_zero():
    up, down = (flow_claims._step("values", torch.zeros(2, 2), sign) for sign in (1, -1))
    assert torch.allclose(up, torch.linspace(0.2, 1.0, 4).reshape(2, 2))
    assert torch.equal(down, -up)
    assert float(flow_claims._step("logprobs", torch.full((2, 2), -0.1), 1).max()) == pytest.approx(-1e-6)
    assert flow_claims._step("logprobs", torch.full((1,), -3.0), 1).tolist() == pytest.approx([-2.8])


def test_columns_differ_by_gradient_or_by_value_alone():
    batch = rows([[5, 5], [6]], advantages=[[1.0, 2.0], [3.0]], costs=[[1.0, 1.0], [1.0]])
    update, new = update_of(batch, priced), New(logprobs=torch.full((2, 2), -1.0))
    assert flow_claims._differ(update, new, {"advantages": batch["advantages"] + 1})
    assert flow_claims._differ(update, new, {"costs": batch["costs"] + 1})
    assert not flow_claims._differ(update, new, {"costs": batch["costs"]})


def test_the_most_changed_update_must_differ_far_enough(grpo):
    batch = rows([[5], [6]], advantages=[[1.0], [2.0]])
    one, near, far = (push(batch, values) for values in ([1.0, 1.0], [1.0, 1.001], [-1.0, 1.0]))
    grpo.rescored = [(DryRunRecord([update_of(batch)]), {"actor.update": near})]
    assert grpo.furthest("actor.update", one) is None
    assert grpo.furthest("actor.update", None) is None
    grpo.rescored += [
        (DryRunRecord([replace(update_of(batch), call=7)]), {"actor.update": far}),
        (DryRunRecord(), {}),
    ]
    assert grpo.furthest("actor.update", one).call == 7
    assert grpo.furthest("critic.update", one) is None


def test_a_dry_run_without_rows_is_unproved_with_its_reason(grpo):
    batch = rows([[5], [6]], advantages=[[1.0], [2.0]])
    empty = DryRunRecord([update_of(batch.rows(torch.zeros(0, dtype=torch.int64)))])
    assert grpo.directions(empty) == {}
    assert grpo.directions(DryRunRecord([update_of(batch)])).keys() == {"actor.update"}
    grpo._base = DryRunRecord(skipped="no group was kept")
    (claim,) = grpo.claims()
    assert (claim.name, claim.verdict, claim.number) == ("rehearsed", "unproved", "no group was kept")


REMEMBERING = """
from rlflow import flow, loss, row, stage, table
import torch

@loss
def gain(new, advantages):
    return -new.logprobs * advantages, {}

@stage(gives="advantages")
def over_level(scores, mask, level):
    return torch.where(mask, (scores - FACTOR * level)[:, None], 0.0)

@flow(keeps=lambda hp: {"seen": table(level=0.0)})
def remembering(prompts, actor, reward, seen):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= seen.read(batch)
    batch |= over_level(batch)
    seen.write(batch.drop("level").rename(scores="level"), level="last")
    actor.update(batch, gain)
"""


@pytest.mark.parametrize(("factor", "verdict"), [("1", "proved"), ("0", "unproved")])
def test_a_read_of_a_table_reaches_the_update(tmp_path, factor, verdict):
    (tmp_path / "kept.py").write_text(REMEMBERING.replace("FACTOR", factor))
    with contextlib.closing(
        prepared(tmp_path, str(tmp_path / "kept.py"), backend="null", prompts=4, prove="off")
    ) as context:
        claims = [claim for claim in FlowClaims(dry_runs(context)).claims() if claim.name == "memory-reaches"]
        assert [len(table) for table in context.engine.memory.values()] == [0]  # a proof writes nothing
    assert [(claim.subject, claim.verdict) for claim in claims] == [("seen.read", verdict)]


COUNTING = """
from rlflow import flow, loss, row, stage, table
import torch

@loss
def gain(new, advantages):
    return -new.logprobs * advantages, {}

@stage(gives="advantages")
def rarer(scores, mask, count):
    assert (count < BOUND).all(), "too large a count"
    return torch.where(mask, (scores / (2 + count))[:, None], 0.0)

@stage(gives={"count": row("float32")})
def counted(count):
    return count + 1

@flow(keeps=lambda hp: {"seen": table(count=0.0)})
def counting(prompts, actor, reward, seen):
    batch = actor.generate(prompts, samples=3, max_tokens=4)
    batch |= reward(batch)
    batch |= seen.read(batch)
    batch |= rarer(batch)
    seen.write(batch | counted(batch), count="set")
    actor.update(batch, gain)
"""


@pytest.mark.parametrize("bound", ["9", "1"])
def test_a_proof_gives_all_rows_of_a_key_the_same_number(tmp_path, bound):
    """Otherwise `set` fails. If a stage refuses the first number that a proof tries, 1, others are tried."""
    (tmp_path / "kept.py").write_text(COUNTING.replace("BOUND", bound))
    with contextlib.closing(
        prepared(tmp_path, str(tmp_path / "kept.py"), backend="null", prompts=4, prove="off")
    ) as context:
        claims = list(FlowClaims(dry_runs(context)).claims())
    found = {claim.name: claim.verdict for claim in claims}
    assert found["memory-reaches"] == "proved"
    assert "padding" in found  # the claims after it are checked too
