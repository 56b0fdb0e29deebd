"""A flow whose calls are due in different iterations. It's in a file of its own, which a resumed run loads again."""

from dataclasses import dataclass

import torch

from rlflow import RANK0, flow, group_mean, loss, scalar, stage


@dataclass(frozen=True)
class Settings:
    samples: int = 3
    max_tokens: int = 7


@loss
def policy_loss(new, logprobs, advantages):
    return (logprobs - new.logprobs) * advantages, {}


@stage(gives="advantages", rows="group")
def centred(scores, group, mask):
    return torch.where(mask, (scores - group_mean(scores, group))[:, None], 0.0)


@loss(new="values")
def to_scores(new, scores):
    return (new.values - scores[:, None]).square(), {}


@stage(gives="advantages")
def over_values(scores, mask, values=None, ref_logprobs=None):
    """Each column that isn't due leaves a trace in the weights."""
    baseline = torch.zeros_like(mask, dtype=torch.float32) if values is None else values
    anchor = 0.0 if ref_logprobs is None else 0.1 * ref_logprobs
    return torch.where(mask, scores[:, None] - baseline - anchor, 0.0)


@stage(gives={"bar": scalar(torch.float32)}, dispatch=RANK0)
def moving(scores, bar):
    return 0.5 * bar + 0.5 * scores.mean(), {"bar": bar}


@loss
def clear(new, logprobs, advantages, bar):
    return (logprobs - new.logprobs) * (advantages - bar), {}


@stage(gives={"restart": scalar(torch.bool)}, dispatch=RANK0)
def restarts(scores):
    return torch.tensor(True)


@flow(state=lambda hp: {"bar": 0.25})
def now_and_then(prompts, actor, critic, reference, reward, hp=Settings()):
    """A critic every two iterations, a reference every three, and a cycle of six."""
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= critic.values(batch, every=2)
    batch |= reference.logprobs(batch, gives="ref_logprobs", every=3, after=1)
    batch |= over_values(batch)
    moving(batch, every=2, after=1)
    critic.update(batch, to_scores, minibatch=8, every=2)
    batch |= restarts(batch, every=3, after=2)
    actor.update(batch, clear, minibatch=8, fresh_optimizer="restart")
    more = actor.generate(prompts, samples=2, max_tokens=hp.max_tokens, every=3)
    more |= reward(more, every=3)
    more |= actor.logprobs(more, every=3)
    more |= centred(more, every=3)
    actor.update(more, policy_loss, every=3)
