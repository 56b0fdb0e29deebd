"""An actor and a critic with bad rows among good ones: a value in one of several places is not finite."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from rlflow import RANK0, flow, loss, repeat, stage

Place = Literal["none", "scores", "logprobs", "values", "loss", "gradient"]


@dataclass(frozen=True)
class Bad:
    place: Place = "none"  # the place of the bad value
    value: Literal["nan", "inf", "-inf"] = "nan"  # the kind of the bad value: a setting cannot be NaN itself
    every: Annotated[int, Ge(1)] = 4  # one row in this many is bad
    drop: bool = False  # drop the bad rows before the update
    max_tokens: int = 4
    minibatch: int = 64


@stage(gives=("scores", "logprobs", "values", "advantages", "keep"), dispatch=RANK0)
def spoil(scores, logprobs, values, mask, *, place, value, every, drop):
    bad, value = torch.arange(len(scores)) % every == every - 1, float(value)
    scores = torch.where(bad & torch.tensor(place == "scores"), value, scores)
    logprobs = torch.where((bad & torch.tensor(place == "logprobs"))[:, None] & mask, value, logprobs)
    values = torch.where((bad & torch.tensor(place == "values"))[:, None] & mask, value, values)
    advantages = torch.where(mask, scores[:, None] - values, 0.0)
    return scores, logprobs, values, advantages, ~bad if drop else torch.ones_like(bad)


@loss
def policy_loss(new, logprobs, advantages, *, place, value):
    objective = -(new.logprobs - logprobs).exp() * advantages
    if place == "loss":
        objective = objective * float(value)
    if place == "gradient":  # the value is 0, its slope is not finite
        objective = objective + (new.logprobs - new.logprobs.detach()).abs().sqrt()
    return objective


@loss(new="values")
def value_loss(new, values, scores):
    return (new.values - scores[:, None]).square() + 0 * values


@flow
def bad(prompts, actor, critic, reward, hp=Bad()):
    def body(fresh):
        rows = actor.generate(fresh, samples=1, max_tokens=hp.max_tokens)
        rows |= reward(rows)
        rows |= actor.logprobs(rows)
        rows |= critic.values(rows)
        return rows | spoil(rows, place=hp.place, value=hp.value, every=hp.every, drop=hp.drop)

    batch = repeat(body, prompts, groups=64, tries=1)
    critic.update(batch, value_loss, minibatch=hp.minibatch)
    actor.update(batch, policy_loss, minibatch=hp.minibatch, place=hp.place, value=hp.value)
