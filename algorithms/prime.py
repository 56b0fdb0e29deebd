"""PRIME: Process Reinforcement through Implicit Rewards (Cui et al. 2025).

A second model, `prm`, learns from outcomes only: it learns to give right responses a higher likelihood than
wrong responses. A token's process reward is beta log(prm / reference). The outcome reward is added at the
last token. The mean of the prompt's other responses is subtracted from each of the two rewards (eq. 5). As in
the paper, `prm` scores the rows before it learns from them. As in the authors' code, the returns are
whitened. Differences from the paper: prompts are not filtered by accuracy (to filter them, put `repeat`
around the sampling, as DAPO does). Truncated importance weights correct the mismatch between sampler and
trainer (Yao et al. 2025). Eq. 5 is implemented as printed; the authors' code also adds a token's distance
from the mean of its own response, divided by samples - 1.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le
from torch.nn.functional import binary_cross_entropy_with_logits

from rlflow import (
    RANK0,
    clipped_gain,
    flow,
    leave_one_out,
    loss,
    place_last,
    reward_to_go,
    row_mean,
    row_sum,
    stage,
    token,
    truncated_weights,
    whiten,
)


@dataclass(frozen=True)
class PRIME:
    samples: Annotated[int, Ge(2)] = 4  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    beta: Annotated[float, Gt(0)] = 0.05  # reward per nat of log(prm / reference)
    correct: float = 0.5  # a response with at least this score is right
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0  # discount per token
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes of the policy over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="rewards", rows="group")
def reward_tokens(prm_logprobs: token(torch.float32), ref_logprobs, scores, group, mask, *, beta):
    """Return each token's process reward minus the other responses' mean process reward. The last token also
    gets the score minus the other responses' mean score."""
    process = beta * (prm_logprobs - ref_logprobs)
    process = process - leave_one_out(row_mean(process, mask), group)[:, None]
    return torch.where(mask, process, 0.0) + place_last(scores - leave_one_out(scores, group), mask)


@stage(gives="advantages", dispatch=RANK0)  # mean and deviation need the complete batch
def normalised_returns(rewards, mask, *, gamma):
    """Return the discounted reward-to-go of each token, whitened over all rows. A row with a missing score
    (NaN) is excluded from the mean and deviation, and from the update."""
    return whiten(reward_to_go(rewards, mask, gamma), mask)


@loss
def outcome_loss(new, ref_logprobs, scores, mask, *, beta, correct):
    logit = beta * row_sum(new.logprobs - ref_logprobs, mask)
    right = (scores >= correct).to(logit)
    return binary_cross_entropy_with_logits(logit, right, reduction="none"), {
        "accuracy": ((logit > 0) == (right > 0)).float()
    }


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow
def prime(prompts, actor, prm, reference, reward, hp=PRIME()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= prm.logprobs(batch, gives="prm_logprobs")
    batch |= reward_tokens(batch, beta=hp.beta)
    batch |= normalised_returns(batch, gamma=hp.gamma)
    prm.update(batch, outcome_loss, beta=hp.beta, correct=hp.correct, mean="rows", minibatch=hp.minibatch)
    actor.update(batch, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
