"""Penalties for long responses, and the groups that dynamic sampling keeps."""

from pathlib import Path

import torch

from rlflow import stop_penalty
from rlflow.algorithms import dapo
from rlflow.author.load import load

registry = load(Path(__file__).with_name("registry.py"))
as_is, transformed = registry.as_is, registry.transformed


def shaped(case):
    lengths, settings = case.inputs["response_lengths"], case.settings
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return dapo.shorten(
        case.inputs["rewards"],
        mask,
        max_tokens=settings["max_response_length"],
        overlong=settings["buffer_len"],
        penalty=settings["penalty_factor"],
    )


@as_is("verl-overlong-1", "verl-overlong-3", "orlhf-overlong-1")
def test_over_long_shaping(case):
    case.agrees(rewards=shaped(case))


@transformed(
    "The peer's penalty continues to grow beyond the maximum length; in rlflow no response is longer than "
    "the maximum. The test does not compare longer responses",
    "areal-overlong-2",
)
def test_over_long_shaping_up_to_the_longest_length(case):
    within = case.inputs["response_lengths"] <= case.settings["max_response_length"]
    assert within.any()
    case.agrees(where=within, rewards=shaped(case))


@as_is("orlhf-stop-1", "orlhf-stop-2", "orlhf-stop-3")
def test_truncated_responses(case):
    finish = ["length" if cut else "stop" for cut in case.inputs["truncated"].tolist()]
    case.agrees(rewards=stop_penalty.function(case.inputs["rewards"], finish, coef=case.settings["coef"]))


@as_is("std-filter-1")
def test_mixed_groups_are_kept(case):
    scores = case.inputs["group_rewards"]
    group = torch.arange(len(scores)).repeat_interleave(scores.shape[1])
    case.agrees(keep_by_std64_gt_1e6=dapo.mixed(scores.reshape(-1), group).reshape(scores.shape)[:, 0])
