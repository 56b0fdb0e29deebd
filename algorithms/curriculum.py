"""GRPO on the most learnable prompts (Foster et al. 2025, "Learning to Reason at the Frontier of Learnability").

The learnability of a prompt is p(1 - p), where p is the share of its responses that are correct (Rutherford et
al. 2024). It is largest for prompts that the policy solves half of the time. Each iteration takes the most
learnable prompts of a larger pool. Differences from the paper: p isn't estimated from new samples. A table
counts the correct responses of earlier iterations, so choosing a prompt costs no tokens. The counts fade over
the iterations. Prompts are compared by the expected value of p(1 - p) under a Beta posterior with a uniform
prior, which also ranks prompts without responses. Truncated importance weights correct the mismatch between
sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from rlflow import (
    choose,
    clipped_gain,
    compare,
    ema,
    flow,
    group_mean,
    loss,
    row,
    stage,
    table,
    truncated_weights,
)


@dataclass(frozen=True)
class Curriculum:
    chosen: Annotated[int, Ge(1)] = 64  # prompts to answer, of those that the iteration gets (--prompts)
    keep: Annotated[float, Gt(0), Le(1)] = 0.9  # share of the counts that stays after an iteration
    correct: float = 0.5  # a response with at least this score is correct
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives={"wins": row("float32"), "tries": row("float32")})
def fade(wins: row("float32"), tries: row("float32"), last: row("float32"), iteration, *, keep):
    """Return the counts that are left of those which iteration `last` stored."""
    left = keep ** (iteration - last)
    return left * wins, left * tries


@stage(gives={"gain": row("float32")})
def learnability(wins: row("float32"), tries: row("float32")):
    """Return the mean of p(1 - p) for p from Beta(wins + 1, losses + 1)."""
    a, b = wins + 1, tries - wins + 1
    gain = a * b / ((a + b) * (a + b + 1))
    return gain, {"gain": gain, "new": (tries == 0).float()}


@stage(gives={"wins": row("float32"), "tries": row("float32"), "last": row("float32")}, rows="group")
def outcomes(scores, group, wins: row("float32"), tries: row("float32"), iteration, *, samples, correct):
    """Return the counts with the group's responses added, and the iteration. A missing score (NaN) counts like
    the mean of the others. If all are missing, everything is NaN."""
    rate = group_mean(torch.where(scores.isnan(), scores, (scores >= correct).to(scores)), group)
    known = torch.where(rate.isnan(), torch.nan, 1.0)
    return wins + samples * rate, (tries + samples) * known, iteration * known, {"rate": rate}


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow(keeps=lambda hp: {"seen": table(wins=0.0, tries=0.0, last=0.0)})
def curriculum(prompts, actor, reward, seen, hp=Curriculum()):
    prompts |= seen.read(prompts, stale_ok="pass rates change slowly")
    prompts |= fade(prompts, keep=hp.keep)
    prompts = choose(prompts | learnability(prompts), top="gain", count=hp.chosen, per="batch")
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= compare(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    actor.update(batch, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
    batch |= fade(batch | seen.read(batch), keep=hp.keep)
    counts = outcomes(batch, samples=hp.samples, correct=hp.correct)
    # ema(0) is the mean of a prompt's rows, if an iteration has it twice
    seen.write(batch | counts, wins=ema(0.0), tries=ema(0.0), last=ema(0.0))
