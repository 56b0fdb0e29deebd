"""Averages of a loss over a minibatch, in one or several parts."""

from pathlib import Path

import torch

from rlflow.author.load import load
from rlflow.training.objective import MinibatchTotals, row_weights, weighted_sum

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed, averaged = registry.as_is, registry.transformed, registry.averaged
MEANS = {
    "verl-agg-token-mean-local": "tokens",
    "verl-agg-seq-mean-token-sum-local": 1.0,
    "verl-agg-seq-mean-token-sum-norm-scale": 100.0,
    "orlhf-agg-1": "tokens",
}


def compared(case, loss, value):
    got = {"loss": loss, "grad_loss_mat": torch.autograd.grad(loss, value)[0]}
    case.agrees(**{name: got[name] for name in case.expected})


@as_is(*MEANS)
def test_means(case):
    value = case.inputs["loss_mat"].clone().requires_grad_()
    compared(case, averaged(value, case.mask, MEANS[case.id]), value)


SUM = "The peer's loss is a sum over tokens; rlflow's losses are means"


@transformed(SUM, "verl-agg-token-sum-local", "verl-agg-token-sum-nanpad")
def test_a_sum(case):
    value = case.inputs["loss_mat"].clone().requires_grad_()
    compared(case, averaged(value, case.mask, "tokens") * case.mask.sum(), value)


@transformed(
    "The peer divides a response's sum by the padded width of the batch, rlflow by a number from the "
    "settings",
    "verl-agg-seq-mean-token-sum-norm-local",
)
def test_a_mean_over_the_padding(case):
    value = case.inputs["loss_mat"].clone().requires_grad_()
    compared(case, averaged(value, case.mask, value.shape[1]), value)


SHARE = (
    "The peer multiplies the loss of a rank by the number of ranks, because its engine averages over ranks; "
    "rlflow sums over ranks"
)


@transformed(SHARE, "verl-agg-seq-mean-token-mean-global", "orlhf-agg-3")
def test_a_share(case):
    value = case.inputs["loss_mat"].clone().requires_grad_()
    totals = MinibatchTotals(
        int(case.settings.get("batch_num_tokens", 40)), int(case.settings["global_batch_size"])
    )
    weights = row_weights(case.mask.sum(1), "row-tokens", totals)
    compared(case, case.settings["dp_size"] * weighted_sum(value, case.mask, weights, "row-tokens"), value)


@as_is("verl-agg-split")
def test_the_parts_sum_up_to_the_full_loss(case):
    value, totals = case.inputs["loss_mat"], MinibatchTotals.of(case.mask.sum(1))
    weights = row_weights(case.mask.sum(1), "tokens", totals)
    parts = [weighted_sum(value[i], case.mask[i], weights[i], "tokens") for i in torch.arange(4).split(1)]
    case.agrees(whole=averaged(value, case.mask, "tokens"), parts=torch.stack(parts))
