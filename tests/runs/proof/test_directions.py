"""The gradient direction: minus the gradient of the full objective with respect to the model's outputs, over
the rows that are learned from."""

import pytest
import torch

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.author.joint import JointLoss
from rlflow.author.node_options import UpdateOptions
from rlflow.runs.proof.directions import Direction, keys, learned_rows, objective, pushed
from rlflow.runs.proof.dry_run import RecordedUpdate
from rlflow.training.objective import New

LENGTHS = (3, 2)
ADVANTAGES = torch.tensor([[1.0, 2.0, 3.0], [-4.0, 5.0, 0.0]])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
HERE = New(logprobs=torch.full((2, 3), -0.5))


@loss
def gain(new, advantages):
    return -new.logprobs * advantages


@loss
def of_rows(new, mask, wants):
    return -(new.logprobs * mask).sum(1) * wants


@loss
def squared(new, *, power):
    return new.logprobs.abs() ** power


def rows(**more):
    """Return rows; row i starts with token 10 + i."""
    tokens = [[10 + i] * n for i, n in enumerate(LENGTHS)]
    return Batch.of(
        prompt_tokens=[[1], [1, 2]],
        tokens=tokens,
        mask=[[True] * n for n in LENGTHS],
        advantages=[ADVANTAGES[i, :n].tolist() for i, n in enumerate(LENGTHS)],
        wants=[2.0, -3.0],
        **more,
    )


PLAIN = UpdateOptions()


def update(one=gain, batch=None, options=PLAIN, **settings):
    return RecordedUpdate(
        "actor.update", "actor", rows() if batch is None else batch, one, settings, 0, options
    )


@pytest.mark.parametrize(
    ("mean", "weights"),
    [("tokens", [[1 / 5], [1 / 5]]), ("row-tokens", [[1 / 6], [1 / 4]]), (10, [[0.05], [0.05]])],
)
def test_the_direction_is_minus_the_gradient_of_the_mean(mean, weights):
    direction = pushed(update(options=UpdateOptions(mean=mean, epochs=2, minibatch=1)), HERE)
    wanted = ADVANTAGES * MASK * torch.tensor(weights)
    assert list(direction.by) == ["logprobs"]
    assert torch.allclose(direction.main, wanted)
    assert torch.allclose(direction.of_rows, wanted.sum(1).double() / torch.tensor(LENGTHS))
    assert float(objective(update(options=UpdateOptions(mean=mean)), HERE)) == pytest.approx(
        float((0.5 * wanted).sum())
    )


def test_a_loss_per_row_moves_every_token_of_the_row():
    direction = pushed(update(of_rows, options=UpdateOptions(mean="rows")), HERE)
    assert torch.allclose(direction.main, MASK * torch.tensor([[1.0], [-1.5]]))
    scores = Direction(rows(), {"scores": torch.tensor([1.0, 2.0])})
    assert scores.of_rows.tolist() == [1.0, 2.0]


def test_loss_settings_apply_and_unread_outputs_have_no_direction():
    assert torch.allclose(pushed(update(squared, power=2), HERE).main, MASK * 2 * 0.5 / 5)

    @loss
    def deaf(new, advantages):
        return 0 * new.logprobs.detach() + advantages

    assert not pushed(update(deaf), HERE).main.any()


def test_given_columns_and_mask_replace_those_in_the_rows():
    other, holes = ADVANTAGES + 1, MASK & torch.tensor([[1, 0, 1], [1, 1, 1]], dtype=torch.bool)
    assert torch.allclose(pushed(update(), HERE, {"advantages": other}).main, other * MASK / 5)
    assert torch.allclose(pushed(update(), HERE, {"mask": holes}).main, ADVANTAGES * holes / 4)
    assert torch.equal(pushed(update(), HERE).main, pushed(update(), HERE, {}).main)


def test_each_loss_scales_the_direction_of_its_own_rows():
    both = JointLoss((gain, of_rows), (1.0, 0.5), (None, "right"))
    direction = pushed(update(both, rows(right=[False, True]), UpdateOptions(mean=("tokens", "rows"))), HERE)
    alone = ADVANTAGES * MASK / 5
    assert torch.allclose(direction.main, alone + 0.5 * MASK * torch.tensor([[0.0], [-3.0]]))
    nobody = JointLoss((gain, of_rows), (1.0, 0.5), ("right", "right"))
    none = update(nobody, rows(right=[False, False]), UpdateOptions(mean=("tokens", "rows")))
    assert float(objective(none, HERE)) == 0.0
    assert not pushed(none, HERE).main.any()


def test_rows_without_a_learning_signal_have_no_direction():
    broken = rows()
    broken |= Batch(broken.axis, Batch.of(advantages=[[1.0] * 3, [float("nan")] * 2]).data)
    learned = learned_rows(update(batch=broken))
    assert keys(learned.batch) == [((1,), (10, 10, 10))]
    assert "wants" not in learned.batch
    assert keys(learned_rows(update()).batch) == [((1,), (10, 10, 10)), ((1, 2), (11, 11))]


def test_the_distance_of_directions_is_relative_to_the_first():
    one = pushed(update(), HERE)
    twice, none = (Direction(one.rows, {"logprobs": one.main * factor}) for factor in (2, 0))
    assert (one.apart(one), one.apart(twice), twice.apart(one), one.apart(none)) == (0.0, 1.0, 0.5, 1.0)
    assert (none.apart(none), none.apart(one)) == (0.0, 1.0)
    assert one.apart(Direction(rows().rows(torch.tensor([1, 0])), one.by)) == float("inf")
    assert one.apart(Direction(one.rows.rows(torch.tensor([0])), {"logprobs": one.main[:1]})) == float("inf")
    assert one.apart(Direction(one.rows, {"values": one.main[:, :2]})) == float("inf")


def test_equal_rows_can_cancel_a_direction():
    equal = Batch.of(prompt_tokens=[[1], [1], [1]], tokens=[[5, 6], [5, 6], [7, 6]], mask=[[True, True]] * 3)
    up, down, none = [0.5, 0.25], [-0.5, -0.25], [0.0, 0.0]
    unsure, certain = (New(logprobs=torch.full((3, 2), number)) for number in (-0.6931472, -1e-6))
    assert Direction(equal, {"logprobs": torch.tensor([up, up, none])}).felt(unsure) == pytest.approx(
        (1.0, 0.5)
    )
    assert Direction(equal, {"logprobs": torch.tensor([up, down, none])}).felt(unsure) == (0.0, 0.0)
    assert Direction(equal, {"logprobs": torch.tensor([up, none, down])}).felt(certain) == pytest.approx(
        (1.0, 1e-6), rel=0.1
    )
    assert Direction(equal, {"logprobs": torch.tensor([none, none, none])}).felt(unsure) == (1.0, 1.0)
    assert Direction(equal, {"scores": torch.tensor([1.0, -1.0, 2.0])}).felt(New(scores=torch.zeros(3))) == (
        0.5,
        0.5,
    )
