"""Self-correction in two attempts: the second stage of SCoRe (Kumar et al. 2024, "Training Language Models to
Self-Correct via Reinforcement Learning").

The policy answers, is told to look again, and answers once more; one update trains both attempts (eq. 4), the
second of which is paid alpha times what it adds to the first (section 5.2). The price of leaving the
reference is a term of the loss, for both attempts (eq. 4). An attempt is credited with its own pay alone:
paid for the second, a first attempt would learn to be wrong. Differs from the paper in the baseline, which is
the mean of the same attempt in the other rows of the prompt, in having no first stage, and in the truncated
weights between sampler and trainer (Yao et al. 2025).
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
    # before the question
    request: str = "There might be an error in this answer. Correct it if there is one, and answer again:"
    # pay of the second attempt for each point that it adds to the first
    alpha: Annotated[float, Ge(0)] = 10.0
    beta: Annotated[float, Ge(0)] = 0.01  # weight of the KL term in the loss; 0 needs no reference
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # truncation of the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives={"question": text})
def look_again(prompt, *, request):
    """What the policy is told after its first attempt."""
    return [f"\n{request}\n{question}" for question in prompt]


@stage(gives={"first_gain": row("float32"), "second_gain": row("float32")}, rows="group")
def shape(scores, second_scores: row("float32"), group, *, alpha):
    """The pay of each attempt, less the mean pay of the same attempt in the other rows of the prompt."""
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
    """What is measured on held-out prompts: the second attempt alone."""
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
