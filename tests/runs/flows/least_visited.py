"""Samples from the prompts that it sampled from least, which a table counts."""

import dataclasses

import torch

from rlflow import choose, flow, loss, row, stage, table, truncated_weights


@dataclasses.dataclass(frozen=True)
class Settings:
    samples: int = 2
    kept: int = 3
    reason: str = "visits change slowly"  # why rows that are sampled ahead may read old visits


@stage(gives={"gain": row(torch.float32)})
def gain(visits):
    return -visits, {"visits": visits}


@stage(gives={"visits": row(torch.float32)})
def visited(scores):
    return torch.ones_like(scores)


@loss
def likelihood(new, scores, weights):
    return -weights * new.logprobs * scores[:, None], {}


@flow(keeps=lambda hp: {"seen": table(visits=0.0)})
def least_visited(prompts, actor, reward, seen, hp=Settings()):
    prompts |= seen.read(prompts, stale_ok=hp.reason or None)
    prompts = choose(prompts | gain(prompts), top="gain", count=hp.kept)
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=4)
    batch |= reward(batch)
    seen.write(batch | visited(batch), visits="add")
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=2.0)
    actor.update(batch, likelihood)
