"""Counts how often each prompt was sampled from, and gives weights to draw prompts by."""

import dataclasses
import math

import torch

from rlflow import flow, loss, repeat, row, stage, table, truncated_weights


@dataclasses.dataclass(frozen=True)
class Settings:
    bar: float = math.inf  # from this many visits on, a prompt has the weight `late`
    late: float = 0.0
    tries: int = 0  # of a repeat that keeps nothing until its last try; 0: none


@stage(gives={"gain": row(torch.float32)})
def gain(visits, *, bar, late):
    return torch.where(visits < bar, 1 / (1 + visits), late)


@stage(gives={"visits": row(torch.float32)})
def visited(prompt_id):
    """The metric says which prompts these are: each has a digit of its own."""
    return torch.ones(len(prompt_id)), {"drawn": 10.0**prompt_id}


@stage(gives="keep", rows="group")
def third(tokens, group):
    return (group // 2) % 3 == 0


@loss
def likelihood(new, scores, weights):
    return -weights * new.logprobs * scores[:, None], {}


@flow(keeps=lambda hp: {"seen": table(visits=0.0)})
def least_drawn(prompts, actor, reward, seen, hp=Settings()):
    def sampled(drawn):
        drawn |= gain(seen.read(drawn, stale_ok="visits change slowly"), bar=hp.bar, late=hp.late)
        rows = actor.generate(drawn, samples=2, max_tokens=4)
        rows |= reward(rows)
        return rows | third(rows) if hp.tries else rows

    batch = repeat(sampled, prompts, groups=4, tries=hp.tries) if hp.tries else sampled(prompts)
    seen.write(batch | visited(batch), visits="add")
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=2.0)
    actor.update(batch, likelihood)
