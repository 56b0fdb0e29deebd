"""VinePPO (Kazemnejad et al. 2025, "Refining Credit Assignment in RL Training of LLMs").

PPO without a critic. A response is divided into steps. The value at the beginning of a step is the mean score
of new responses that continue from that point (eq. 5). The advantage of a step's tokens is the value after
the step minus the value before it (eq. 6). The value after the last step is the response's score. Differences
from the paper: steps have equal length, while the paper's steps are lines of reasoning. Truncated importance
weights correct the mismatch between sampler and trainer (Yao et al. 2025). Further differences from the
authors' run: the authors whiten advantages over the batch. They pass twice over the rows of an iteration (set
`--hp.epochs 2`). Their loss has a KL term with weight 1e-4 and estimator k3, cut off at 10 (`--hp.beta 1e-4`
is similar, but uses k2). Here, a continuation may be as long as a complete response.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import (
    ask,
    clipped_gain,
    flow,
    group,
    group_mean,
    kl_penalty,
    loss,
    stage,
    token,
    truncated_weights,
)


@dataclass(frozen=True)
class VinePPO:
    samples: Annotated[int, Ge(1)] = 8  # responses per prompt
    rollouts: Annotated[int, Ge(1)] = 9  # continuations from the beginning of each step
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response, and longest continuation
    step: Annotated[int, Ge(1)] = 128  # tokens per step
    beta: Annotated[float, Ge(0)] = 0.0  # KL coefficient in the loss; 0 needs no reference
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step, over all ranks


@stage(gives={"begins": token("bool")})
def steps(mask, *, step):
    """Return whether each token is the first of a step. A step has `step` of the policy's own tokens."""
    return mask & ((mask.cumsum(1) - 1) % step == 0)


@stage(gives={"state_values": group("float32")}, rows="group")
def mean_score(scores, group):
    return group_mean(scores, group)


@stage(gives="advantages")
def gain_of_steps(scores, state_values: token("float32"), mask):
    """Return, at each token, the value after its step minus the value before the step. If the value at the
    beginning of a step is missing (NaN), the step is joined to the previous step. If it is missing for the
    first step, the update skips the response."""
    known = mask & ~state_values.isnan()
    before, after = torch.empty_like(state_values), torch.empty_like(state_values)
    value = scores  # the value at the next beginning after a token
    for t in reversed(range(mask.shape[1])):
        after[:, t] = value
        value = torch.where(known[:, t], state_values[:, t], value)
    value = torch.full_like(scores, torch.nan)  # the value at the last beginning up to a token
    for t in range(mask.shape[1]):
        value = before[:, t] = torch.where(known[:, t], state_values[:, t], value)
    return torch.where(mask, after - before, 0.0)


@loss
def policy_loss(new, logprobs, advantages, weights, ref_logprobs=None, *, clip, beta):
    ratio = (new.logprobs - logprobs).exp()
    charge = 0 if ref_logprobs is None else beta * kl_penalty(new.logprobs, logprobs, ref_logprobs, "k2")
    return charge - weights * clipped_gain(ratio, advantages, clip, clip), {
        "clipped": (ratio - 1).abs() > clip
    }


@flow
def vineppo(prompts, actor, reference, reward, hp=VinePPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= steps(batch, step=hp.step)
    onward = actor.generate(ask(batch, tokens_until="begins"), samples=hp.rollouts, max_tokens=hp.max_tokens)
    onward |= reward(onward)
    batch |= mean_score(onward)
    batch |= gain_of_steps(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    if hp.beta:
        batch |= reference.logprobs(batch, gives="ref_logprobs")
    actor.update(batch, policy_loss, clip=hp.clip, beta=hp.beta, epochs=hp.epochs, minibatch=hp.minibatch)
