"""Differences of GRPO's variants: masked tokens, the ratio of a response, and the divisor of the sum."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from rlflow.algorithms import clip_cov, gmpo
from rlflow.author.load import load_flow
from rlflow.compiler.trace.compile import compile_flow

MASK = torch.tensor([[True, True, True], [True, True, False]])
LOGPROBS = torch.tensor([[-0.1, -2.0, -1.0], [-4.0, -0.9, torch.nan]])
ADVANTAGES = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, torch.nan]])


def choose(
    form="clip", share=0.4, seed=0, mask=MASK, logprobs=LOGPROBS, advantages=ADVANTAGES, low=0.5, high=9.0
):
    chance = torch.Generator().manual_seed(seed)
    return clip_cov.hold(
        logprobs, advantages, mask, form=form, share=share, low=low, high=high, generator=chance
    )[0]


def gradient(form, selection, logprobs=LOGPROBS, mask=MASK, advantages=ADVANTAGES):
    new = torch.where(mask, logprobs, -1.0).detach() + 0.1
    new.requires_grad_()
    columns = (
        torch.where(mask, logprobs, -1.0),
        torch.where(mask, advantages, 0.0),
        torch.ones_like(advantages),
        selection,
    )
    value, _ = clip_cov.policy_loss(SimpleNamespace(logprobs=new), *columns, form=form, clip=0.2, beta=1.0)
    torch.where(mask, value, 0.0).sum().backward()
    return new.grad


def test_kl_cov_selects_the_tokens_of_the_highest_covariance():
    # 1.2 and 2.88 among the five
    assert choose("kl").tolist() == [[True, False, False], [True, False, False]]


@pytest.mark.parametrize("form", ["clip", "kl"])
def test_a_small_share_of_few_tokens_selects_one_token(form):
    """The authors' max(int(share · tokens), 1): below 5,000 tokens the usual share of 2e-4 is less than one
    token.
    """
    assert choose(form, share=2e-4, low=0.1).sum() == 1
    assert choose(form, share=0.0, low=0.1).sum() == 0


def test_clip_cov_draws_from_the_tokens_between_its_bounds():
    assert choose(share=1.0).tolist() == [[True, False, False], [True, False, False]]
    assert choose(share=1.0, high=2.0).tolist() == [[True, False, False], [False, False, False]]
    drawn = {tuple(choose(share=0.2, seed=seed).flatten().tolist()).index(True) for seed in range(20)}
    assert drawn == {0, 3}


def test_padding_with_a_covariance_of_0_is_never_drawn():
    """Bounds around 0 would include the padding."""
    mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
    logprobs = torch.tensor([[-1.0, -3.0, 0.0, 0.0], [-2.0, 0.0, 0.0, 0.0]])
    advantages = torch.tensor([[1.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    for seed in range(8):
        selection = choose(
            share=1.0, seed=seed, mask=mask, logprobs=logprobs, advantages=advantages, low=-9.0, high=9.0
        )
        assert torch.equal(selection, mask)


@pytest.mark.parametrize("form", ["clip", "kl"])
def test_the_selection_does_not_depend_on_padding(form):
    wide = [
        torch.cat([x, torch.full((2, 2), fill, dtype=x.dtype)], 1)
        for x, fill in ((MASK, False), (LOGPROBS, 0), (ADVANTAGES, 0))
    ]
    selection = choose(form, share=0.2, mask=wide[0], logprobs=wide[1], advantages=wide[2])
    assert torch.equal(selection[:, :3], choose(form, share=0.2))
    assert not bool(selection[:, 3:].any())


def test_clip_cov_removes_the_gradient_of_selected_tokens_only():
    selection = choose()
    free, plain = gradient("clip", selection), gradient("clip", torch.zeros_like(selection))
    assert not bool(free[selection].any())
    assert torch.equal(free[~selection], plain[~selection])
    assert bool(plain[selection].all())


def test_kl_cov_penalises_the_movement_of_selected_tokens():
    selection = choose("kl")
    charged, plain = gradient("kl", selection), gradient("kl", torch.zeros_like(selection))
    # it rose by 0.1: the gradient lowers it again, with the coefficient beta
    assert (charged - plain)[selection].tolist() == pytest.approx([1.0, 1.0])
    assert torch.equal(charged[~selection], plain[~selection])


def test_gradients_do_not_depend_on_micro_batches():
    selection = choose()
    pieces = [
        gradient("clip", selection[i : i + 1], LOGPROBS[i : i + 1], MASK[i : i + 1], ADVANTAGES[i : i + 1])
        for i in range(2)
    ]
    assert torch.equal(torch.cat(pieces), gradient("clip", selection))


def test_gmpo_has_one_value_per_response_with_a_mean_weight():
    new = SimpleNamespace(logprobs=torch.where(MASK, LOGPROBS + 0.1, torch.nan))
    weights = torch.tensor([[1.0, 2.0, 0.0], [0.5, 0.5, torch.nan]])
    value, metrics = gmpo.policy_loss(new, LOGPROBS, ADVANTAGES, weights, MASK, low=0.4, high=0.4)
    torch.testing.assert_close(value, torch.tensor([-1.1052, 0.5 * 1.1052]), atol=1e-4, rtol=0)
    assert not bool(metrics["clipped"][MASK].any())


@pytest.mark.parametrize(
    ("mean", "divisor"), [("tokens", "tokens"), ("row-tokens", "row-tokens"), ("constant", 16)]
)
def test_grpo_divides_by_the_configured_divisor(mean, divisor):
    flow = load_flow("grpo")
    graph = compile_flow(flow, dataclasses.replace(flow.parameters.hp, mean=mean, max_tokens=16)).graph
    assert graph.nodes[-1].settings.mean == divisor
