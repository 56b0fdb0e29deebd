"""On-policy distillation (Agarwal et al. 2024, GKD; Lu et al. 2025, Thinking Machines): the teacher scores
the student's tokens.

The student samples. A token's advantage is its negative reverse KL to the teacher: log p_teacher - log
p_student. Rewards are not summed over later tokens. With `jsd` below 1, the divergence is GKD's generalised
Jensen-Shannon divergence; with `jsd` 0, it is the forward KL. In general, the divergence is the sum over the
vocabulary of p_student g(u), with u = p_teacher / p_student. A token's advantage is then `u g'(u) - g(u)`.
Differences from the papers: GKD sums over the vocabulary, while this file takes the policy gradient of the
sampled token. This file also has a clipped ratio, and truncated importance weights, which correct the
mismatch between sampler and trainer (Yao et al. 2025).
"""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from rlflow import clipped_gain, flow, kl, loss, stage, token, truncated_weights


@dataclass(frozen=True)
class Distill:
    samples: Annotated[int, Ge(1)] = 4  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    # GKD's beta: 1 is the reverse KL, 0 the forward KL, a value between them a mixture
    jsd: Annotated[float, Ge(0), Le(1)] = 1.0
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="advantages")
def judge(logprobs, teacher_logprobs: token(torch.float32), mask, *, jsd=1.0):
    """Return the advantages, and estimates of the reverse KL and the minimised divergence as metrics."""
    reverse_kl, log_u = kl(logprobs, teacher_logprobs, "k1"), teacher_logprobs - logprobs
    if jsd == 1:
        return torch.where(mask, -reverse_kl, 0.0), {"reverse_kl": reverse_kl}
    if jsd == 0:
        advantages, divergence = log_u.exp() - 1, log_u.exp() * log_u
    else:
        # log of the mixture over the student
        mixed = torch.logaddexp(log_u + math.log(jsd), torch.full_like(log_u, math.log(1 - jsd)))
        advantages, divergence = (1 - jsd) * mixed, jsd * log_u.exp() * (log_u - mixed) - (1 - jsd) * mixed
    return torch.where(mask, advantages, 0.0), {"reverse_kl": reverse_kl, "divergence": divergence}


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow
def distill(prompts, actor, teacher, hp=Distill()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    batch |= teacher.logprobs(batch, gives="teacher_logprobs")
    batch |= judge(batch, jsd=hp.jsd)
    actor.update(batch, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
