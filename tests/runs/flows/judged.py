"""Flows that define their own evaluation."""

import torch

from rlflow import ask, choose, flow, leave_one_out, loss, row, stage, text, truncated_weights


@loss
def policy_loss(new, logprobs, advantages, weights):
    return -weights * (new.logprobs - logprobs).exp() * advantages, {}


@stage(gives="advantages", rows="group")
def centred(scores, group, mask):
    return torch.where(mask, (scores - leave_one_out(scores, group))[:, None], 0.0)


@stage(gives={"question": text})
def again(prompt, completion):
    return [f"{completion} {prompt}" for prompt, completion in zip(prompt, completion, strict=True)]


@stage(gives={"length": row("float32")})
def lengths(mask, *, generator):
    """Return the number of tokens; ties are broken at random."""
    return mask.sum(1) + torch.stack([torch.rand((), generator=one) for one in generator])


def trained(prompts, actor, reward, tokens=6):
    batch = actor.generate(prompts, samples=4, max_tokens=tokens)
    batch |= reward(batch)
    batch |= centred(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=2.0)
    actor.update(batch, policy_loss)


def greedily(prompts, actor, reward):
    batch = actor.generate(prompts, max_tokens=6, temperature=0)
    return batch | reward(batch)


@flow
def usual(prompts, actor, reward):
    trained(prompts, actor, reward)


@flow(evaluate=greedily)
def greedy(prompts, actor, reward):
    trained(prompts, actor, reward)


def last_of_two(prompts, actor, reward):
    first = actor.generate(prompts, samples=3, max_tokens=6)
    shortest = choose(first | lengths(first), top="length", count=1, per="group")
    last = actor.generate(
        ask(shortest | again(shortest), "question", after="tokens"), max_tokens=6, temperature=0.7
    )
    return last | reward(last)


@flow(evaluate=last_of_two)
def two(prompts, actor, reward):
    trained(prompts, actor, reward)


@stage(gives={"none": row("bool")})
def none(mask):
    return torch.zeros(len(mask), dtype=torch.bool)


def of_nothing(prompts, actor, reward):
    first = actor.generate(prompts, max_tokens=6)
    nothing = choose(first | none(first), "none")
    last = actor.generate(ask(nothing | again(nothing), "question"), max_tokens=6)
    return last | reward(last)


@flow(evaluate=of_nothing)
def nothing(prompts, actor, reward):
    trained(prompts, actor, reward)


@stage(gives="scores")
def half(mask):
    return torch.full((len(mask),), 0.5)


def by_side(prompts, actor):
    batch = actor.generate(prompts, max_tokens=6)
    return batch | half(batch)


@flow(evaluate=by_side)
def halves(prompts, actor, reward):
    trained(prompts, actor, reward)
