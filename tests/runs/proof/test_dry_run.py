"""Dry runs: synthetic scores, seeded and unequal within each group, and the records made instead of
updates."""

import torch

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.runs.proof.dry_run import raised, stretched, uneven


def test_synthetic_scores_differ_within_groups_and_follow_the_seed():
    axis = Axis.fresh(3).repeat(4)
    scores = uneven(1)("reward", axis)
    assert torch.equal(scores, uneven(1)("reward", axis))
    assert not torch.equal(scores, uneven(2)("reward", axis))
    assert all(len(set(group.tolist())) == 4 and float(group.min()) == 0 for group in scores.reshape(3, 4))
    assert [float(group.max()) for group in uneven(2)("reward", axis).reshape(3, 4)] == [1.0] * 3
    assert len({float(group.mean()) for group in scores.reshape(3, 4)}) > 1


def test_rows_without_groups_form_one_group():
    assert len(set(uneven(1)("reward", Axis.fresh(5)).tolist())) == 5


def test_the_scores_of_one_reward_can_change_alone():
    axis = Axis.fresh(6)
    assert torch.equal(uneven(3, only="other")("reward", axis), uneven(0)("reward", axis))
    assert not torch.equal(uneven(3, only="reward")("reward", axis), uneven(0)("reward", axis))


def test_stretched_scores_are_multiplied_by_a_factor():
    assert uneven(1)("reward", Axis.fresh(0)).tolist() == []
    axis = Axis.fresh(6)
    assert torch.equal(stretched(uneven(1), -100.0)("reward", axis), uneven(1)("reward", axis) * -100)


def test_columns_are_raised_in_the_chosen_rows():
    batch = Batch.of(logprobs=[[-1.0, -2.0], [-3.0], [-4.0]], scores=[1.0, 2.0, 3.0])
    chosen = torch.tensor([True, False, True])
    assert raised(batch.data["logprobs"], 0.5, chosen).value.tolist() == [-0.5, -1.5, -3.0, -3.5]
    assert raised(batch.data["scores"], 0.5, chosen).value.tolist() == [1.5, 2.0, 3.5]


def test_dry_runs_share_short_rows_and_record_the_update(
    grpo,
):
    stage = grpo.stage
    before = {name: tensor.clone() for name, tensor in stage.engine.models["actor"].trainer.state().items()}
    one, other = stage.dry_run_once(uneven(1)), stage.dry_run_once(uneven(2))
    assert torch.equal(one.scored[0].scores, uneven(1)("reward", one.scored[0].batch.axis))
    assert [update.node for update in one.updates] == ["actor.update"]
    assert one.updates[0].role == "actor"
    assert torch.equal(one.updates[0].batch["tokens"], other.updates[0].batch["tokens"])
    assert not torch.equal(one.updates[0].batch["advantages"], other.updates[0].batch["advantages"])
    assert one.updates[0].batch["tokens"].shape[1] <= stage.longest
    assert (one.judged, one.skipped) == ([], "")
    after = stage.engine.models["actor"].trainer.state()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_the_dry_run_calls_the_reward_three_times(
    grpo,
):
    asked = grpo.stage.dry_run_once(None, asks=True)
    [judged] = asked.judged
    assert asked.scored == []
    assert judged.node == "reward"
    assert len(judged.once) == len(asked.updates[0].batch)
    assert torch.equal(judged.once, judged.again)
    assert torch.equal(judged.once, judged.shuffled)


def test_a_raised_forward_leaves_the_weights_unchanged(grpo):
    plain, higher = (
        grpo.stage.dry_run_once(uneven(1)),
        grpo.stage.dry_run_once(uneven(1), shift={"actor.logprobs": 0.5}),
    )
    mask = plain.updates[0].batch["mask"]
    step = (higher.updates[0].batch["logprobs"] - plain.updates[0].batch["logprobs"])[mask]
    even = (torch.arange(len(mask)) % 2 == 0)[:, None].expand_as(mask)[mask]
    assert torch.allclose(step, 0.5 * even)
    filled = grpo.stage.dry_run_once(uneven(1), fill=float("nan"))
    assert torch.equal(filled.updates[0].batch["advantages"], plain.updates[0].batch["advantages"])


def test_follow_up_prompts_are_equal_in_all_dry_runs(grpo):
    one, other = grpo.stage._prompts(), grpo.stage._prompts()
    first, second = one(2), one(2)
    assert other(2) is first
    assert other(2) is second
    assert first is not second
