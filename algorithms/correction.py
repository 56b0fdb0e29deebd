"""Self-correction in two attempts: the second stage of SCoRe (Kumar et al. 2024, "Training Language Models to
Self-Correct via Reinforcement Learning").

The policy answers, gets a request to check its answer, and answers again. One update trains both attempts
(eq. 4). The second attempt's reward is its score plus alpha times its improvement over the first attempt
(section 5.2). The loss of both attempts has a KL term to the reference (eq. 4). The improvement is not part
of the first attempt's reward: otherwise, the policy would learn to make its first attempt wrong. Differences
from the paper: an attempt's baseline is the mean reward of the same attempt in the prompt's other rows.
SCoRe's first stage is not implemented. Truncated importance weights correct the mismatch between sampler and
trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt

from rlflow import (
    ask,
    clipped_gain,
    concat,
    flow,
    kl_penalty,
    leave_one_out,
    loss,
    row,
    stage,
    text,
    truncated_weights,
)


@dataclass(frozen=True)
class Correction:
    samples: Annotated[int, Ge(2)] = 4  # first attempts per prompt; each is followed by one second attempt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest attempt
    # comes before the repeated question
    request: str = "There might be an error in this answer. Correct it if there is one, and answer again:"
    # reward of the second attempt per point of improvement over the first
    alpha: Annotated[float, Ge(0)] = 10.0
    beta: Annotated[float, Ge(0)] = 0.01  # KL coefficient in the loss; 0 needs no reference
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives={"question": text})
def look_again(prompt, *, request):
    """Return the follow-up prompts after the first attempt: the request, and the question again."""
    return [f"\n{request}\n{question}" for question in prompt]


@stage(gives={"first_gain": row("float32"), "second_gain": row("float32")}, rows="group")
def shape(scores, second_scores: row("float32"), group, *, alpha):
    """Return each attempt's reward, minus the mean reward of this attempt in the prompt's other rows."""
    second = second_scores + alpha * (second_scores - scores)
    return (
        scores - leave_one_out(scores, group),
        second - leave_one_out(second, group),
        {"added": second_scores - scores},
    )


@stage(gives="advantages")
def at_each_token(gain: row("float32"), mask):
    return torch.where(mask, gain[:, None], 0.0)


@loss
def policy_loss(new, logprobs, advantages, weights, ref_logprobs=None, *, clip, beta):
    ratio = (new.logprobs - logprobs).exp()
    charge = 0 if ref_logprobs is None else beta * kl_penalty(new.logprobs, logprobs, ref_logprobs, "k2")
    return charge - weights * clipped_gain(ratio, advantages, clip, clip), {
        "clipped": (ratio - 1).abs() > clip
    }


def last_attempt(prompts, actor, reward, hp):
    """Sample both attempts and score the second. Evaluation on held-out prompts measures only this score."""
    first = actor.generate(prompts, max_tokens=hp.max_tokens)
    last = actor.generate(
        ask(first | look_again(first, request=hp.request), "question", after="tokens"),
        max_tokens=hp.max_tokens,
    )
    return last | reward(last)


@flow(evaluate=last_attempt)
def correction(prompts, actor, reference, reward, hp=Correction()):
    first = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    first |= reward(first)
    second = actor.generate(
        ask(first | look_again(first, request=hp.request), "question", after="tokens"),
        max_tokens=hp.max_tokens,
    )
    first |= reward(second, gives="second_scores")
    first |= shape(first, alpha=hp.alpha)
    first |= at_each_token(first.rename(first_gain="gain"))
    second |= at_each_token(second | first.select("second_gain").rename(second_gain="gain"))
    both = concat(first, second)
    both |= actor.logprobs(both)
    both |= truncated_weights(both, cap=hp.is_cap)
    if hp.beta:
        both |= reference.logprobs(both, gives="ref_logprobs")
    actor.update(both, policy_loss, clip=hp.clip, beta=hp.beta, epochs=hp.epochs, minibatch=hp.minibatch)
