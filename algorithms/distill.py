"""On-policy distillation (Agarwal et al. 2024, GKD; Lu et al. 2025, Thinking Machines): the teacher judges each token of the student.

The student samples; the advantage of a token is minus its reverse KL to the teacher, log p_teacher - log p_student, with no
discount, so each token answers for itself. Differs from GKD in the policy gradient on the sampled token in place of the sum over
the vocabulary, and from both in the clipped ratio and the truncated weights between sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import clipped_gain, flow, kl, loss, stage, token, truncated_weights


@dataclass(frozen=True)
class Distill:
    samples: Annotated[int, Ge(1)] = 4  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # truncation of the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="advantages")
def judge(logprobs, teacher_logprobs: token(torch.float32), mask):
    reverse_kl = kl(logprobs, teacher_logprobs, "k1")
    return torch.where(mask, -reverse_kl, 0.0), {"reverse_kl": reverse_kl}


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
    batch |= judge(batch)
    actor.update(batch, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
