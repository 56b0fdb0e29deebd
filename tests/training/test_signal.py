"""Counts of gradients: by hand, and independent of micro-batches and ranks. Counting leaves the update
bit-identical.
"""

import gc
import weakref

import pytest
import torch

from rlflow import clipped_gain, loss
from rlflow.author.batch import Batch
from rlflow.training.learning import (
    OptimizerStep,
    Passes,
    RankShare,
    learn,
    learn_shares,
    steps,
    together,
    token_funnel,
    watch,
)
from rlflow.training.loss_rows import mask_counts
from rlflow.training.metrics import Meter
from rlflow.training.objective import New
from rlflow.training.peers import Peers

ROWS = 6


class Engine:
    """A policy with one number for each token id."""

    device, peers = torch.device("cpu"), Peers()

    def __init__(self):
        self.weight = torch.linspace(-1.0, 1.0, 20, dtype=torch.float64).requires_grad_()

    def compute(self, rows, want):
        return New(logprobs=self.weight[rows["tokens"]])

    def backward(self, objective):
        objective.backward()

    def step(self):
        with torch.no_grad():
            # a rank without rows has none
            self.weight -= 0 if self.weight.grad is None else 0.5 * self.weight.grad
        self.weight.grad = None
        return OptimizerStep(True, 1.0, 0.5)


@loss
def clipped(new, logprobs, advantages, *, clip):
    return -clipped_gain((new.logprobs - logprobs).exp(), advantages, clip, clip)


@loss
def nothing(new, advantages):
    return -new.logprobs * advantages * 0


def rows(count=ROWS):
    """Draw rows of 2 to 4 tokens. The last token of each is masked out, half of them have no advantage, and
    ratios are around 1 on both sides.
    """
    lengths = [2 + row % 3 for row in range(count)]
    tokens = [[(3 * row + t) % 20 for t in range(n)] for row, n in enumerate(lengths)]
    old = torch.linspace(-1.0, 1.0, 20, dtype=torch.float64)
    shift = [[(-1) ** (row + t) * 0.4 for t in range(n)] for row, n in enumerate(lengths)]
    return Batch.of(
        prompt_tokens=[[1]] * count,
        tokens=tokens,
        mask=[[True] * (n - 1) + [False] for n in lengths],
        logprobs=[
            [float(old[i]) + s for i, s in zip(*pair, strict=True)]
            for pair in zip(tokens, shift, strict=True)
        ],
        advantages=[[float(row % 2)] * n for row, n in enumerate(lengths)],
    )


def test_tokens_with_a_gradient_and_clipped_tokens_are_counted():
    metrics = learn(Engine(), rows(), clipped, {"clip": 0.2}, Passes())
    # Of 12 tokens 6 have an advantage of 1. A ratio of e^0.4 is clipped above; a ratio of e^-0.4 is not,
    # because its gain is the smaller one.
    above = sum((row + t) % 2 == 1 for row in (1, 3, 5) for t in range(1 + row % 3))
    tokens = sum(1 + row % 3 for row in range(ROWS))
    moving = sum(1 + row % 3 for row in (1, 3, 5)) - above
    assert above
    assert metrics["funnel/tokens"] == tokens
    assert metrics["funnel/tokens_with_gradient"] == moving
    assert metrics["funnel/tokens_clipped_above"] == above
    assert metrics["funnel/tokens_clipped_below"] == 0
    assert metrics["funnel/tokens_effective"] == pytest.approx(moving)  # all of one size
    assert metrics["funnel/moved"] == pytest.approx(0.4)


def test_a_loss_without_a_gradient_has_no_effective_tokens():
    metrics = learn(Engine(), rows(), nothing, {}, Passes())
    assert (metrics["funnel/tokens_with_gradient"], metrics["funnel/tokens_effective"]) == (0, 0)
    assert metrics["funnel/tokens"] == 12
    assert "funnel/tokens_clipped_above" not in metrics  # the loss has no ratio
    assert "funnel/moved" not in metrics


@pytest.mark.parametrize("micro_tokens", [1, 9, 10_000])
def test_counts_do_not_depend_on_micro_batches(micro_tokens):
    whole = learn(Engine(), rows(), clipped, {"clip": 0.2}, Passes(epochs=2, minibatch=4))
    parts = learn(
        Engine(), rows(), clipped, {"clip": 0.2}, Passes(epochs=2, minibatch=4, micro_tokens=micro_tokens)
    )
    names = [name for name in whole if name.startswith("funnel/")]
    assert len(names) == 6
    assert {name: parts[name] for name in names} == pytest.approx(
        {name: whole[name] for name in names}, rel=1e-12
    )


def test_counts_do_not_depend_on_ranks():
    batch, passes = rows(), Passes()
    [share] = steps(list(torch.arange(ROWS).split(1)), mask_counts(batch), passes)
    parts = [
        learn_shares(
            Engine(), batch, clipped, {"clip": 0.2}, passes, [RankShare(share.units[a:b], share.totals)]
        )
        for a, b in ((0, 4), (4, 6), (6, 6))
    ]
    whole = learn(Engine(), batch, clipped, {"clip": 0.2}, passes)
    assert {
        name: value for name, value in together(parts, 0).items() if name.startswith("funnel/")
    } == pytest.approx(
        {name: value for name, value in whole.items() if name.startswith("funnel/")}, rel=1e-12
    )


def test_counting_leaves_the_gradient_unchanged():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    gradients = []
    for looks in (False, True):
        new = New(logprobs=torch.where(torch.ones(3, 4, dtype=torch.bool), x, 0.0))
        if looks:
            watch(new, torch.ones(3, 4, dtype=torch.bool), {}, Meter())
        (new.logprobs.exp().sum() / 7).backward()
        gradients.append(x.grad.clone())
        x.grad = None
    assert torch.equal(*gradients)


def test_a_model_of_scores_has_no_tokens():
    meter = Meter()
    watch(New(scores=torch.zeros(3, requires_grad=True)), torch.ones(3, 4, dtype=torch.bool), {}, meter)
    assert token_funnel(meter.rank_totals()) == {}


def test_counting_keeps_no_graph_and_no_weights_after_an_update():
    engine = Engine()
    weight = weakref.ref(engine.weight)
    learn(engine, rows(), clipped, {"clip": 0.2}, Passes())
    del engine
    gc.collect()
    assert weight() is None
