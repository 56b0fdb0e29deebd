"""Remembers in every way: prompts are chosen by a table, older rows are drawn again, and a reference moves."""

import dataclasses

import torch

from rlflow import (
    buffer,
    choose,
    compare,
    concat,
    ema,
    flow,
    follow,
    kl,
    loss,
    row,
    stage,
    table,
    truncated_weights,
)


@dataclasses.dataclass(frozen=True)
class Settings:
    samples: int = 2
    chosen: int = 3
    replayed: int = 2


@stage(gives={"gain": row(torch.float32)})
def gain(visits, level):
    return level - visits


@stage(gives={"visits": row(torch.float32), "level": row(torch.float32)})
def outcomes(scores):
    return torch.ones_like(scores), scores


@loss
def policy_loss(new, logprobs, ref_logprobs, advantages, weights):
    gained = (new.logprobs - logprobs).exp() * advantages - 0.1 * kl(new.logprobs, ref_logprobs, "k3")
    return -gained * weights, {}


@flow(
    keeps=lambda hp: {
        "seen": table(visits=0.0, level=0.5),
        "past": buffer(groups=5, max_age=3),
        "anchor": follow("actor", every=2, after=1, mix=0.5),
    }
)
def remembering(prompts, actor, anchor, reward, seen, past, hp=Settings()):
    prompts |= seen.read(prompts, stale_ok="visits change slowly")
    prompts = choose(prompts | gain(prompts), top="gain", count=hp.chosen)
    old = past.draw(groups=hp.replayed)
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=4)
    batch |= reward(batch)
    seen.write(batch.drop("visits", "level") | outcomes(batch), visits="add", level=ema(0.8))
    past.put(batch)
    both = concat(batch, old)
    both |= compare(both)
    both |= actor.logprobs(both)
    both |= anchor.logprobs(both, gives="ref_logprobs")
    both |= truncated_weights(both, cap=2.0)
    actor.update(both, policy_loss, minibatch=4)
