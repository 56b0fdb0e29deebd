"""VAPO: Value-based Augmented PPO (Yue et al. 2025).

PPO with a learned critic for long responses. Differences from PPO (ppo.py): the critic learns from returns
with lambda 1. The policy learns from advantages whose lambda grows with the response length: 1 - 1 / (alpha
length) (eq. 5 and 6). In the first iterations, only the critic learns (value pretraining). The policy has a
second loss term: the likelihood of right responses, averaged over their tokens (eq. 9 and 10). As in DAPO,
the loss is the mean over all tokens, and the upper clip bound is larger. Difference from the paper: truncated
importance weights correct the mismatch between sampler and trainer in both losses (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from rlflow import clipped_gain, flow, gae, loss, place_last, row, stage, truncated_weights


@dataclass(frozen=True)
class VAPO:
    samples: Annotated[int, Ge(1)] = 16  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    alpha: Annotated[float, Gt(0)] = 0.05  # the policy's lambda is 1 - 1 / (alpha tokens), at least 0
    mu: Annotated[float, Ge(0)] = 0.1  # weight of the likelihood of right responses
    correct: float = 0.5  # a response with at least this score is right
    clip_low: Annotated[float, Gt(0)] = 0.2  # the ratio is clipped at 1 - clip_low
    clip_high: Annotated[float, Gt(0)] = 0.28  # and at 1 + clip_high
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    warmup: Annotated[int, Ge(0)] = 50  # number of first iterations that train only the critic
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 512  # rows per optimizer step, over all ranks


@stage(gives={"right": row("bool")})
def is_right(scores, *, correct):
    return scores >= correct


@stage(gives=("advantages", "returns"))
def decoupled_gae(scores, values, mask, *, alpha):
    """Return (advantages with a lambda that depends on the response length, returns with lambda 1). Neither
    is discounted."""
    rewards, lengths = place_last(scores, mask), mask.sum(1).clamp(min=1)
    lam = (1 - 1 / (alpha * lengths.to(values))).clamp(min=0)
    advantages, _ = gae(rewards, values, mask, gamma=1.0, lam=lam)
    _, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    return advantages, returns, {"lambda": lam}


@loss
def policy_loss(new, logprobs, advantages, weights, *, low, high):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, low, high), {
        "clipped": (ratio < 1 - low) | (ratio > 1 + high)
    }


@loss
def likelihood(new, weights):
    return -weights * new.logprobs, {"probability": new.logprobs.exp()}


@loss(new="values")
def value_loss(new, returns):
    return 0.5 * (new.values - returns).square(), {}


@flow
def vapo(prompts, actor, critic, reward, hp=VAPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= is_right(batch, correct=hp.correct)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    batch |= critic.values(batch)
    batch |= decoupled_gae(batch, alpha=hp.alpha)
    critic.update(batch, value_loss, epochs=hp.epochs, minibatch=hp.minibatch)
    actor.update(
        batch,
        (policy_loss, likelihood),
        scale=(1.0, hp.mu),
        mean=("tokens", "tokens"),
        where=(None, "right"),
        low=hp.clip_low,
        high=hp.clip_high,
        epochs=hp.epochs,
        minibatch=hp.minibatch,
        after=hp.warmup,
    )
