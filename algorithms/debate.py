"""Two players who answer, read each other, and answer again (Du et al. 2023, "Improving Factuality and
Reasoning through Multiagent Debate"), trained on the result (after MAPoRL, Park et al. 2025).

The first player opens. The second player reads the opening and replies. The first player reads both turns and
closes. A turn's reward is its own score plus a share of the mean score of the later turns, which rewards a
player for helping the other. A turn's baseline is the mean reward of the same turn in the prompt's other
debates. Differences from the papers: the players speak in turn. There are two players and a verifiable
reward. Truncated importance weights correct the mismatch between sampler and trainer (Yao et al. 2025).
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt, Le

from rlflow import ask, clipped_gain, concat, flow, leave_one_out, loss, row, stage, text, truncated_weights


@dataclass(frozen=True)
class Debate:
    samples: Annotated[int, Ge(2)] = 8  # debates per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest turn
    request: str = "That was another player's answer. Give your own:"  # comes before the repeated question
    share: Annotated[float, Ge(0), Le(1)] = 0.3  # weight of the later turns' scores in a turn's reward
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives={"question": text})
def pass_on(prompt, completion, topic: text, *, request):
    """Return the next player's prompts: the debate so far, and the question again."""
    said = zip(prompt, completion, topic, strict=True)
    return [f"{before} {answer}\n{request}\n{question}" for before, answer, question in said]


@stage(
    gives={"opening_gain": row("float32"), "reply_gain": row("float32"), "closing_gain": row("float32")},
    rows="group",
)
def settle(scores, reply_scores: row("float32"), closing_scores: row("float32"), group, *, share):
    """Return each turn's reward, minus the mean reward of this turn in the prompt's other debates."""
    later = (reply_scores + closing_scores) / 2
    pays = (
        (1 - share) * scores + share * later,
        (1 - share) * reply_scores + share * closing_scores,
        closing_scores,
    )
    return *(pay - leave_one_out(pay, group) for pay in pays), {
        "opening": scores,
        "reply": reply_scores,
        "closing": closing_scores,
    }


@stage(gives="advantages")
def at_each_token(gain: row("float32"), mask):
    return torch.where(mask, gain[:, None], 0.0)


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow
def debate(prompts, one, other, reward, hp=Debate()):
    prompts |= prompts.select("prompt").rename(prompt="topic")
    opening = one.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    reply = other.generate(
        ask(opening | pass_on(opening, request=hp.request), "question"), max_tokens=hp.max_tokens
    )
    closing = one.generate(
        ask(reply | pass_on(reply, request=hp.request), "question"), max_tokens=hp.max_tokens
    )
    opening |= reward(opening)
    opening |= reward(reply, gives="reply_scores")
    opening |= reward(closing, gives="closing_scores")
    opening |= settle(opening, share=hp.share)
    opening |= at_each_token(opening.rename(opening_gain="gain"))
    reply |= at_each_token(reply | opening.select("reply_gain").rename(reply_gain="gain"))
    closing |= at_each_token(closing | opening.select("closing_gain").rename(closing_gain="gain"))
    for player, rows in ((one, concat(opening, closing)), (other, reply)):
        rows |= player.logprobs(rows)
        rows |= truncated_weights(rows, cap=hp.is_cap)
        player.update(rows, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
