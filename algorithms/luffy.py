"""LUFFY, "Learning to Reason under Off-Policy Guidance" (Yan et al. 2025): GRPO whose groups contain a demonstration.

The demonstration of each prompt joins the group of the sampled responses, so it counts in the group's mean.
Its tokens have no ratio, because no policy is known that sampled them. Their gain is the advantage times
p / (p + gamma), where p is the token's probability. This shaping gives unlikely tokens a larger gradient, and
it isn't clipped. Differences from the paper: there is no entropy bonus, and truncated importance weights
correct the mismatch between sampler and trainer for sampled responses (Yao et al. 2025). A prompt whose
demonstration is empty or too long has a group of sampled responses only.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt

from rlflow import clipped_gain, compare, concat, encode, flow, loss, text, truncated_weights


@dataclass(frozen=True)
class LUFFY:
    samples: Annotated[int, Ge(1)] = 7  # responses per prompt, besides the demonstration
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response, and longest demonstration
    gamma: Annotated[float, Gt(0)] = (
        0.1  # a demonstrated token of this probability has half of the largest gain
    )
    deviation: bool = False  # divide advantages by the standard deviation of the group's scores
    # average the loss over all tokens, or divide its sum by rows x max_tokens (Dr. GRPO, as in the paper)
    mean: Literal["tokens", "constant"] = "constant"
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio, for sampled responses
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@loss
def mixed_loss(new, logprobs, advantages, weights, part, *, clip, gamma):
    shown = (part == 1)[:, None]
    chance, ratio = new.logprobs.exp(), (new.logprobs - logprobs).exp()
    shaped = chance / (chance + gamma)
    sampled_gain = weights * clipped_gain(ratio, advantages, clip, clip)
    return -torch.where(shown, shaped * advantages, sampled_gain), {
        "clipped": torch.where(shown, torch.nan, ((ratio - 1).abs() > clip).float()),
        "shown_chance": torch.where(shown, chance, torch.nan),
    }


@flow(data={"demonstration": text})
def luffy(prompts, actor, reward, hp=LUFFY()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    shown = encode(prompts, "demonstration", actor, max_tokens=hp.max_tokens)
    shown |= reward(shown)
    both = concat(batch, shown, groups="prompts", fill={"sampled_logprobs": 0.0})
    both |= actor.logprobs(both)
    both |= truncated_weights(both, cap=hp.is_cap)
    both |= compare(both, deviation=hp.deviation)
    mean = hp.max_tokens if hp.mean == "constant" else hp.mean
    actor.update(
        both,
        mixed_loss,
        clip=hp.clip,
        gamma=hp.gamma,
        mean=mean,
        epochs=hp.epochs,
        minibatch=hp.minibatch,
    )
