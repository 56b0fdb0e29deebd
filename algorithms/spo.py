"""Single-stream Policy Optimization, SPO (Xu and Ding 2025).

Each prompt is answered once. The baseline is the prompt's expected score, which a table tracks: the mean of a
Beta posterior. Its evidence fades the further the policy has moved since it last answered the prompt.
Advantages are whitened over the batch. Differences from the paper: the authors' code measures the movement on
the prompt's last response. Here, it is the sum of each update's mean change of the log-probs of its own tokens,
so changes that cancel each other count too. The prior is a setting instead of an estimate from samples. All
prompts are drawn equally often. Truncated importance weights correct the mismatch between sampler and trainer
(Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from rlflow import (
    RANK0,
    clipped_gain,
    ema,
    flow,
    loss,
    masked_mean,
    row,
    scalar,
    stage,
    table,
    token,
    truncated_weights,
    whiten,
)


@dataclass(frozen=True)
class SPO:
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    prior: float = 0.5  # expected score of a prompt without a response
    prior_weight: Annotated[float, Gt(0)] = 1.0  # how many responses the prior counts as
    half: Annotated[float, Gt(0)] = 0.06  # movement that halves a prompt's evidence, nats per token
    keep_low: Annotated[float, Ge(0), Le(1)] = 0.875  # smallest share of the evidence that stays
    keep_high: Annotated[float, Ge(0), Le(1)] = 0.96  # largest share
    clip_low: Annotated[float, Gt(0)] = 0.2  # the ratio may fall to 1 - clip_low
    clip_high: Annotated[float, Gt(0)] = 0.28  # and rise to 1 + clip_high
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives="advantages", dispatch=RANK0)  # mean and deviation need the complete batch
def compare(scores, value: row("float32"), mask):
    """Return each score minus its prompt's value, whitened over all rows, at each token. A row with a missing
    score (NaN) is excluded from the mean and deviation, and from the update."""
    gain = (scores - value)[:, None]
    return torch.where(mask, whiten(gain, torch.ones_like(gain, dtype=torch.bool)), 0.0)


@stage(gives={"moved": scalar("float32")}, dispatch=RANK0)  # the mean is over the complete batch
def move(logprobs, later_logprobs: token("float32"), mask, moved: scalar("float32")):
    """Return how far the policy has moved since the run began: the sum of its updates' mean changes."""
    change = masked_mean((later_logprobs - logprobs).abs(), mask)
    return moved + change, {"change": change}


@stage(gives={"value": row("float32"), "evidence": row("float32"), "moved_then": row("float32")})
def track(
    scores,
    value: row("float32"),
    evidence: row("float32"),
    moved_then: row("float32"),
    moved: scalar("float32"),
    *,
    half,
    low,
    high,
):
    """Return each prompt's new expected score, the number of scores that it counts as, and how far the policy
    has moved by now. They are NaN for a row with a missing score."""
    kept = torch.exp2((moved_then - moved) / half).clamp(low, high)
    known = torch.where(scores.isnan(), torch.nan, 1.0)
    evidence = (kept * evidence + 1) * known
    return value + (scores - value) / evidence, evidence, moved * known, {"kept": kept, "evidence": evidence}


@loss
def policy_loss(new, logprobs, advantages, weights, *, low, high):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, low, high), {
        "clipped": (ratio < 1 - low) | (ratio > 1 + high)
    }


@flow(
    state=lambda hp: {"moved": 0.0},
    keeps=lambda hp: {"tracker": table(value=hp.prior, evidence=hp.prior_weight, moved_then=0.0)},
)
def spo(prompts, actor, reward, tracker, hp=SPO()):
    batch = actor.generate(prompts, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= tracker.read(batch)
    batch |= compare(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    actor.update(
        batch,
        policy_loss,
        low=hp.clip_low,
        high=hp.clip_high,
        epochs=hp.epochs,
        minibatch=hp.minibatch,
    )
    batch |= actor.logprobs(batch, gives="later_logprobs")
    batch |= move(batch)
    batch |= track(batch, half=hp.half, low=hp.keep_low, high=hp.keep_high)
    # ema(0) is the mean of a prompt's rows, if an iteration has it twice
    tracker.write(batch, value=ema(0.0), evidence="set", moved_then="set")
