"""LUFFY's numbers, computed by hand: the group's mean with the demonstration in it, and the shaped loss."""

import json
import math
from types import SimpleNamespace

import pytest
import torch

import rlflow
from rlflow.algorithms import luffy
from rlflow.execution.row_ledger import UpdateRows

HP = luffy.LUFFY(samples=3, max_tokens=6)


def learned(tmp_path, scores, hp=HP):
    """Return the batch of the update for three prompts, of which the second has no demonstration.

    scores: of a sampled row, and of a demonstration.
    """
    lessons = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(3)]
    for lesson, demonstration in zip(lessons, ("1", "", "3"), strict=True):
        lesson["demonstration"] = demonstration
    file = tmp_path / "lessons.jsonl"
    file.write_text("".join(f"{json.dumps(lesson)}\n" for lesson in lessons))
    roles = rlflow.roles(luffy.luffy, hp, backend="null", data=str(file), prompts=3, held_out=0)
    engine, found = roles.prepared.engine, []

    def scored(batch):
        return torch.tensor([scores[text in ("1", "3")] for text in batch["completion"]]), {}

    def update(role, batch, *rest, **options):
        found.append(batch)
        return {}, UpdateRows(torch.zeros(len(batch), dtype=torch.int64), (), waits=True)

    engine.scorers = {"reward": scored}
    engine.update = update
    luffy.luffy(roles.take(), **roles)
    (batch,) = found
    return batch


def test_a_demonstration_is_in_the_mean_of_its_group(tmp_path):
    batch = learned(tmp_path, (0.0, 1.0))
    groups = [batch["part"][batch["group"] == number].tolist() for number in range(3)]
    assert sorted(groups) == [[0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]]
    one = batch["advantages"][:, 0].tolist()
    # the mean of three sampled responses of score 0 and a demonstration of score 1 is 1/4
    by_hand = [[-0.25, -0.25, -0.25, 0.75] if 1 in group else [0.0, 0.0, 0.0] for group in groups]
    assert one == [value for group in by_hand for value in group]


def test_the_deviation_is_of_the_group_with_the_demonstration(tmp_path):
    batch = learned(tmp_path, (0.0, 1.0), luffy.LUFFY(samples=3, max_tokens=6, deviation=True))
    shown = batch["advantages"][batch["part"] == 1][:, 0]
    # deviation with n - 1: sqrt((3 * 0.25**2 + 0.75**2) / 3) = 0.5
    assert shown.tolist() == pytest.approx([0.75 / (0.5 + 1e-4)] * 2)


# a sampled row and a demonstration, of two tokens each
CHANCE = torch.tensor([[0.3, 0.6], [0.1, 0.4]], dtype=torch.float64)
BEFORE = torch.tensor([[0.2, 0.6], [0.01, 0.9]], dtype=torch.float64)
ADVANTAGES = torch.tensor([[-0.25, -0.25], [0.75, 0.75]], dtype=torch.float64)
WEIGHTS = torch.tensor([[0.5, 2.0], [0.1, 0.4]], dtype=torch.float64)


def loss_of(advantages):
    new = CHANCE.log().requires_grad_()
    value, metrics = luffy.mixed_loss(
        SimpleNamespace(logprobs=new),
        BEFORE.log(),
        advantages,
        WEIGHTS,
        torch.tensor([0, 1]),
        clip=0.2,
        gamma=0.1,
    )
    (gradient,) = torch.autograd.grad(value.sum(), new)
    return value, gradient, metrics


def test_demonstrated_tokens_gain_their_shaped_probability():
    value, gradient, metrics = loss_of(ADVANTAGES)
    # p / (p + 0.1) is 1/2 at 0.1 and 4/5 at 0.4; neither a ratio nor a weight of the sampler is in it
    assert value[1].tolist() == pytest.approx([-0.75 * 0.5, -0.75 * 0.8])
    # the derivative for log p is 0.1 p / (p + 0.1)^2; the largest ratios, 10 and 4/9, aren't clipped
    assert gradient[1].tolist() == pytest.approx([-0.75 * 0.01 / 0.04, -0.75 * 0.04 / 0.25])
    assert metrics["shown_chance"][1].tolist() == pytest.approx([0.1, 0.4])
    assert bool(metrics["shown_chance"][0].isnan().all())
    assert metrics["clipped"].isnan().tolist() == [[False, False], [True, True]]


def test_sampled_tokens_are_clipped_and_weighed():
    value, gradient, _ = loss_of(-ADVANTAGES)
    # the ratios are 1.5, clipped to 1.2 because the advantage is positive, and 1
    assert value[0].tolist() == pytest.approx([-0.5 * 1.2 * 0.25, -2.0 * 0.25])
    assert gradient[0].tolist() == pytest.approx([0.0, -2.0 * 0.25])
    value, gradient, metrics = loss_of(ADVANTAGES)  # a negative advantage isn't clipped above
    assert value[0].tolist() == pytest.approx([0.5 * 1.5 * 0.25, 2.0 * 0.25])
    assert gradient[0].tolist() == pytest.approx([0.5 * 1.5 * 0.25, 2.0 * 0.25])
    assert metrics["clipped"][0].tolist() == [1.0, 0.0]


def test_shaping_favours_unlikely_tokens():
    """The gain per log-prob is largest at p = gamma, and falls for likely tokens."""
    gains = {p: p * 0.1 / (p + 0.1) ** 2 for p in (0.001, 0.01, 0.1, 0.5, 0.99)}
    new = torch.tensor([[math.log(p) for p in gains]], dtype=torch.float64).requires_grad_()
    ones = torch.ones_like(new)
    value, _ = luffy.mixed_loss(
        SimpleNamespace(logprobs=new), new.detach(), ones, ones, torch.tensor([1]), clip=0.2, gamma=0.1
    )
    (gradient,) = torch.autograd.grad(-value.sum(), new)
    assert gradient[0].tolist() == pytest.approx([*gains.values()])
    assert gradient[0].argmax() == 2
