"""A curriculum: questions of one difficulty level, which rises if most are answered and falls if few are."""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import RANK0, choose, compare, flow, loss, repeat, row, scalar, stage, truncated_weights


@dataclass(frozen=True)
class Curriculum:
    samples: Annotated[int, Ge(2)] = 4  # responses per question
    max_tokens: Annotated[int, Ge(1)] = 8  # longest response
    questions: Annotated[int, Ge(1)] = 4  # of the level, for each iteration
    tries: Annotated[int, Ge(1)] = 4  # how often records are drawn for an iteration at most
    low: float = 0.4  # mean score below which the level falls
    high: float = 0.6  # and above which it rises
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    minibatch: Annotated[int, Ge(1)] = 16  # rows per optimizer step


@stage(gives={"suits": row("bool")})
def suiting(difficulty: row("float32"), level):
    """Return True if a question is no harder than the level, before anything is sampled for it."""
    return difficulty <= level


@stage(gives={"level": scalar(torch.float32)}, dispatch=RANK0)
def moved(scores, level, *, low, high):
    mean = scores.nanmean()
    return (level + (mean > high).float() - (mean < low).float()).clamp(1, 5), {"level": level}


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


@flow(state=lambda hp: {"level": 1.0}, data={"difficulty": row("float32")})
def curriculum(prompts, actor, reward, hp=Curriculum()):
    def of_level(fresh):
        return choose(fresh | suiting(fresh), "suits")

    prompts = repeat(of_level, prompts, groups=hp.questions, tries=hp.tries)
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= compare(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=2.0)
    actor.update(batch, policy_loss, clip=hp.clip, minibatch=hp.minibatch)
    moved(batch, low=hp.low, high=hp.high)  # the level of the next iteration
