"""REINFORCE Leave-One-Out, RLOO (Ahmadian et al. 2024, "Back to Basics").

A response's baseline is the mean score of the other responses to its prompt. As in the paper, the KL to the
reference is subtracted from the score of the complete response. Differences from the paper: a clipped ratio
allows several optimizer steps; it does not change the first. Truncated importance weights correct the
mismatch between sampler and trainer (Yao et al. 2025). The sum over a response's tokens, which is the paper's
gradient, is divided by the constant max_tokens.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import clipped_gain, flow, kl, leave_one_out, loss, row_sum, stage, truncated_weights


@dataclass(frozen=True)
class RLOO:
    samples: Annotated[int, Ge(2)] = 4  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    beta: Annotated[float, Ge(0)] = 0.05  # KL coefficient, per nat; 0 needs no reference
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="scores")
def charge_kl(scores, logprobs, mask, ref_logprobs, *, beta):
    """Return each score minus beta times the KL of the complete response to the reference (estimator k1)."""
    return scores - beta * row_sum(kl(logprobs, ref_logprobs, "k1"), mask)


@stage(gives="advantages", rows="group")
def compare(scores, group, mask):
    """Return each score minus the mean score of the group's other rows, at each token. The update skips a row
    with a missing score (NaN)."""
    return torch.where(mask, (scores - leave_one_out(scores, group))[:, None], 0.0)


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow
def rloo(prompts, actor, reference, reward, hp=RLOO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    if hp.beta:
        batch |= reference.logprobs(batch, gives="ref_logprobs")
        batch |= charge_kl(batch, beta=hp.beta)
    batch |= compare(batch)
    actor.update(
        batch, policy_loss, clip=hp.clip, mean=hp.max_tokens, epochs=hp.epochs, minibatch=hp.minibatch
    )
