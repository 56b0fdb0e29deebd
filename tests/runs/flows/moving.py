"""A policy that is penalised for leaving a reference, which follows it."""

from dataclasses import dataclass

import torch

from rlflow import RANK0, compare, flow, follow, kl, loss, scalar, stage


@dataclass(frozen=True)
class Settings:
    samples: int = 4
    max_tokens: int = 4
    every: int = 1
    after: int = 0
    mix: float = 0.25
    when: bool = False  # follow when a stage says so, in odd iterations
    begin: int = 0  # first iteration of the update
    answers: bool = False  # the reference samples the rows


@stage(gives={"odd": scalar(torch.bool)}, dispatch=RANK0)
def is_odd(iteration):
    return iteration % 2 == 1


@loss(stale_ok="the test compares weights")
def policy_loss(new, logprobs, advantages, ref_logprobs):
    return -(new.logprobs - logprobs).exp() * advantages + 0.1 * kl(new.logprobs, ref_logprobs, "k3"), {}


def keeps(hp):
    if hp.when:
        return {"anchor": follow("actor", when="odd", mix=hp.mix)}
    return {"anchor": follow("actor", every=hp.every, after=hp.after, mix=hp.mix)}


def answered(prompts, anchor, reward):
    batch = anchor.generate(prompts, samples=1, max_tokens=4)
    return batch | reward(batch)


@flow(keeps=keeps, evaluate=answered)
def moving(prompts, actor, anchor, reward, hp=Settings()):
    sampler = anchor if hp.answers else actor
    batch = sampler.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    if hp.when:
        is_odd(batch)
    batch |= actor.logprobs(batch)
    batch |= anchor.logprobs(batch, gives="ref_logprobs")
    batch |= compare(batch)
    actor.update(batch, policy_loss, after=hp.begin)
    return batch
