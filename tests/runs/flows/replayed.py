"""Trains on sampled rows together with rows of earlier iterations, drawn from a buffer."""

import dataclasses

import torch

from rlflow import buffer, compare, concat, flow, group, loss, stage, truncated_weights


@dataclasses.dataclass(frozen=True)
class Settings:
    replayed: int = 2
    samples: int = 2
    kept: int = 5
    age: int = 3


@stage(gives={"spread": group(torch.float32)}, rows="group")
def spread(scores, group):
    return torch.stack([scores[group == each].max() for each in group]) + 0.5


@loss
def policy_loss(new, logprobs, advantages, weights):
    return -(new.logprobs - logprobs).exp() * advantages * weights, {}


@flow(keeps=lambda hp: {"past": buffer(groups=hp.kept, max_age=hp.age, evict="spread")})
def replayed(prompts, actor, reward, past, hp=Settings()):
    old = past.draw(groups=hp.replayed, weight="spread")
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=4)
    batch |= reward(batch)
    past.put(batch | spread(batch), also=("spread",))
    both = concat(batch, old)
    both |= compare(both)
    both |= actor.logprobs(both)
    both |= truncated_weights(both, cap=2.0)
    actor.update(both, policy_loss, minibatch=4)
