"""Clipped Importance-Sampling Policy Optimization, CISPO (MiniMax 2025, "MiniMax-M1").

REINFORCE with GRPO's advantages. The policy ratio is a weight without gradient, capped at `ratio_cap`. Unlike
with PPO's clip, every token keeps its gradient. `ratio_cap` is the maximum ratio itself, not its distance
from 1. As in the paper's runs, the ratio has no lower bound. Difference from the paper: truncated importance
weights correct the mismatch between sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from rlflow import compare, flow, loss, truncated_weights


@dataclass(frozen=True)
class CISPO:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    ratio_cap: Annotated[float, Ge(1)] = 5.0  # largest weight that the policy ratio can give a token
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@loss
def policy_loss(new, logprobs, advantages, weights, *, cap):
    ratio = (new.logprobs.detach() - logprobs).exp()
    return -weights * ratio.clamp(max=cap) * advantages * new.logprobs, {"clipped": ratio > cap}


@flow
def cispo(prompts, actor, reward, hp=CISPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    batch |= compare(batch)
    actor.update(batch, policy_loss, cap=hp.ratio_cap, epochs=hp.epochs, minibatch=hp.minibatch)
