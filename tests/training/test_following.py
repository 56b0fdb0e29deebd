"""Weights move towards others in place, by the same steps however they are divided."""

import pytest
import torch

from rlflow.training.following import follow, move


class Model:
    """A model whose weights are these tensors."""

    def __init__(self, **tensors):
        self.tensors = tensors

    def masters(self):
        yield from self.tensors.items()


def test_three_steps_by_hand():
    weights, mix = torch.tensor([1.0, -2.0]), 0.25
    for other, expected in (
        ([5.0, 2.0], [2.0, -1.0]),
        ([2.0, -1.0], [2.0, -1.0]),
        ([0.0, 0.0], [1.5, -0.75]),
    ):
        move(weights, torch.tensor(other), mix)
        assert weights.tolist() == expected


def test_a_mix_of_one_copies_the_bits():
    weights, other = torch.tensor([1e8, 3.0]), torch.tensor([0.1, float("inf")])
    move(weights, other, 1.0)
    assert torch.equal(weights, other)


def test_a_shorter_dtype_is_mixed_in_the_longer_one():
    weights = torch.ones(1)
    move(weights, torch.tensor([1.0078125], dtype=torch.bfloat16), 0.1)
    assert weights.item() == torch.tensor(1.0).add(torch.tensor(0.0078125) * 0.1).item()


def test_counts_are_copied():
    count = torch.tensor(3)
    move(count, torch.tensor(8), 0.1)
    assert count.item() == 8


def test_the_result_does_not_depend_on_how_tensors_are_divided():
    chance = torch.Generator().manual_seed(0)
    whole, other = (torch.randn(1000, generator=chance) for _ in range(2))
    parts, others = whole.clone().split(37), other.split(37)
    move(whole, other, 0.3)
    for part, value in zip(parts, others, strict=True):
        move(part, value, 0.3)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ({"one": torch.ones(2)}, "found no 'two'"),
        ({"one": torch.ones(3), "two": torch.ones(2)}, r"found 'one' \[3\], expected the shape \[2\]"),
        ({"one": torch.ones(2), "three": torch.ones(2)}, r"found 'three' \[2\], expected one of two"),
    ],
)
def test_models_with_other_tensors_are_refused(others, told):
    model = Model(one=torch.ones(2), two=torch.ones(2))
    with pytest.raises(ValueError, match=told):
        follow(model, others.items(), 0.5)
