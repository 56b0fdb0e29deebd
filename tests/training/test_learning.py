"""The loop of an update, with an engine of one parameter: new.logprobs equals that parameter for every token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.author.joint import JointLoss
from rlflow.training.learning import OptimizerStep, Passes, learn
from rlflow.training.loss_rows import NO_LOSS, broken_columns
from rlflow.training.objective import New
from rlflow.training.peers import Peers


class Engine:
    """An engine that records its calls. It takes every step unless the test marks the step as broken."""

    device = torch.device("cpu")
    peers = Peers()

    def __init__(self, breaks=()):
        self.weight = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self.breaks, self.seen, self.gradients = list(breaks), [], []

    def compute(self, rows, want):
        self.seen.append([row[0] for row in rows["tokens"].tolist()])
        return New(logprobs=self.weight.expand(rows["tokens"].shape))

    def backward(self, objective):
        objective.backward()

    def step(self):
        self.gradients.append(float(self.weight.grad))
        self.weight.grad = None
        return OptimizerStep(len(self.gradients) - 1 not in self.breaks, abs(self.gradients[-1]), 0.1)


def batch(lengths, **more):
    """Row i starts with token 10 + i."""
    return Batch.of(
        prompt_tokens=[[1]] * len(lengths),
        tokens=[[10 + i] * n for i, n in enumerate(lengths)],
        mask=[[True] * n for n in lengths],
        **more,
    )


@loss
def plain(new, mask):
    return new.logprobs, {"seven": 7.0}


@loss(rows="group")
def paired(new, mask, group):
    assert len(group) % 2 == 0
    return new.logprobs.sum(1), {"pairs": group[0::2] == group[1::2]}


def test_every_epoch_sees_every_row_once_in_its_own_order():
    engine = Engine()
    metrics = learn(engine, batch([3] * 6), plain, {}, Passes(epochs=2, minibatch=2, micro_tokens=1))
    seen = [row for rows in engine.seen for row in rows]
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(10, 16))
    assert seen[:6] != seen[6:]
    assert metrics == {
        "seven": 7.0,
        "steps": 6,
        "skipped_steps": 0,
        "rows": 12,
        "lr": 0.1,
        "loss": 0.0,
        "grad_norm": 1.0,
        "left_out": 0,
        "funnel/tokens": 36,
        "funnel/tokens_with_gradient": 36,
        "funnel/tokens_effective": 36,
    }


def test_the_gradient_of_a_token_mean_ignores_the_cut():
    for tokens in (1, 5, 1000):
        engine = Engine()
        learn(engine, batch([1, 2, 3, 4, 5]), plain, {}, Passes(micro_tokens=tokens))
        assert engine.gradients == pytest.approx([1.0])


def test_pairs_are_never_split():
    engine = Engine()
    pairs = batch([2, 1] * 4, group=[i // 2 for i in range(8)])
    metrics = learn(engine, pairs, paired, {}, Passes(minibatch=4, mean="rows", micro_tokens=1))
    assert all(rows[1] == rows[0] + 1 and rows[0] % 2 == 0 for rows in engine.seen)
    assert metrics["pairs"] == 1.0
    assert metrics["steps"] == 2


def test_skipped_steps_are_counted_and_excluded_from_the_means():
    metrics = learn(Engine(breaks=[1]), batch([2] * 4), plain, {}, Passes(minibatch=2, epochs=2))
    assert (metrics["steps"], metrics["skipped_steps"]) == (3, 1)


def test_a_minibatch_without_a_masked_token_takes_no_step():
    engine = Engine()
    rows = Batch.of(prompt_tokens=[[1]], tokens=[[2, 3]], mask=[[False, False]])
    assert learn(engine, rows, plain, {}, Passes())["steps"] == 0
    assert engine.seen == []


def test_a_mean_is_checked_before_the_first_forward():
    with pytest.raises(ValueError, match="found mean='token'"):
        Passes(mean="token")
    with pytest.raises(ValueError, match="minibatch=0"):
        Passes(minibatch=0)


@loss
def policy(new, advantages):
    return -new.logprobs * advantages, {"gain": advantages}


@loss
def likelihood(new, targets):
    return -new.logprobs, {"wanted": targets}


@loss(rows="group")
def over_groups(new, group, mask):
    assert (group.bincount(minlength=1)[group] == 2).all()
    return -new.logprobs.sum(1), {"pairs": 1.0}


def right_rows(lengths, right, **more):
    """Return rows with their number as advantage, some of them right. Unread columns of the wrong rows are
    NaN.
    """
    targets = [1.0 if each else float("nan") for each in right]
    return batch(
        lengths,
        advantages=[[float(i)] * n for i, n in enumerate(lengths)],
        right=right,
        targets=targets,
        **more,
    )


@given(
    rows=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=9),
    micro=st.sampled_from([1, 7, 1000]),
    mean=st.tuples(*[st.sampled_from(["tokens", "row-tokens", 3.0])] * 2),
    scale=st.floats(-2, 2),
    size=st.none() | st.integers(1, 4),
)
def test_each_of_several_losses_keeps_the_gradient_of_its_own_rows(rows, micro, mean, scale, size):
    lengths, right = [length for length, _ in rows], [each for _, each in rows]
    everything = right_rows(lengths, right)
    both = JointLoss((policy, likelihood), (1.0, scale), (None, "right"))
    joint = Engine()
    metrics = learn(joint, everything, both, {}, Passes(mean=mean, micro_tokens=micro))
    alone, own = Engine(), Engine()
    learn(alone, everything, policy, {}, Passes(mean=mean[0]))
    if any(right):
        learn(own, everything.rows(torch.tensor(right)), likelihood, {}, Passes(mean=mean[1]))
    assert joint.gradients == pytest.approx([alone.gradients[0] + scale * sum(own.gradients)])
    assert metrics["left_out"] == 0
    assert ("likelihood/wanted" in metrics) is any(right)
    assert metrics["policy/gain"] == pytest.approx(sum(i * n for i, n in enumerate(lengths)) / sum(lengths))
    assert learn(Engine(), everything, both, {}, Passes(mean=mean, minibatch=size, micro_tokens=micro))[
        "rows"
    ] == len(rows)


def test_rows_without_a_loss_and_unreadable_rows_are_skipped():
    rows = right_rows([2, 2, 2, 2], [True, False, False, True])
    advantages = [[0.0] * 2, [1.0] * 2, [float("nan")] * 2, [0.0] * 2]
    rows |= Batch(rows.axis, Batch.of(more=[False, True, False, False], advantages=advantages).data)
    both = JointLoss((policy, likelihood), (1.0, 1.0), ("more", "right"))
    assert broken_columns(rows, both).tolist() == [0, 0, NO_LOSS, 0]
    assert learn(Engine(), rows, both, {}, Passes())["left_out"] == 1
    assert broken_columns(rows, JointLoss((policy, likelihood), (1.0, 1.0), (None, "right"))).tolist() == [
        0,
        0,
        1,
        0,
    ]


def test_a_group_loss_next_to_a_row_loss_keeps_groups_complete():
    rows = right_rows([1] * 6, [True, False] * 3, group=[i // 2 for i in range(6)])
    both = JointLoss((likelihood, over_groups), (1.0, 1.0), ("right", None))
    engine = Engine()
    metrics = learn(engine, rows, both, {}, Passes(mean=("tokens", "rows"), minibatch=2, micro_tokens=1))
    assert metrics["steps"] == 3
    assert engine.gradients == pytest.approx([-2.0] * 3)
