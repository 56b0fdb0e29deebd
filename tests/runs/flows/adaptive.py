"""Group advantages on groups with unequal scores (`repeat`) and an adaptive KL coefficient (state)."""

from dataclasses import dataclass

import torch

from rlflow import RANK0, flow, group_mean, group_std, kl, loss, masked_mean, repeat, stage


@dataclass(frozen=True)
class Adaptive:
    samples: int = 4
    max_tokens: int = 4
    beta: float = 0.1


@stage(gives="keep", rows="group")
def worth_it(scores, group):
    return group_std(scores, group) >= 0  # keep all groups: the test must not depend on luck


@stage(gives="advantages", rows="group")
def compare(scores, group, mask):
    return torch.where(mask, (scores - group_mean(scores, group))[:, None], 0.0)


@stage(gives="beta", dispatch=RANK0)
def adapt(beta, logprobs, ref_logprobs, mask):
    return beta * torch.where(masked_mean(kl(logprobs, ref_logprobs, "k3"), mask) > 1e-4, 1.5, 0.9)


@loss
def policy_loss(new, logprobs, advantages, ref_logprobs, beta):
    return -(new.logprobs - logprobs).exp() * advantages + beta * kl(new.logprobs, ref_logprobs, "k2")


@flow(state=lambda hp: {"beta": hp.beta})
def adaptive(prompts, actor, reference, reward, hp=Adaptive()):
    def body(fresh):
        rows = actor.generate(fresh, samples=hp.samples, max_tokens=hp.max_tokens)
        rows |= reward(rows)
        return rows | worth_it(rows)

    batch = repeat(body, prompts, groups=6, tries=3)
    batch |= actor.logprobs(batch)
    batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= compare(batch)
    batch |= adapt(batch)
    actor.update(batch, policy_loss, minibatch=8)
