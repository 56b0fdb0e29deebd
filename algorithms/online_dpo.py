"""Online DPO (Guo et al. 2024): DPO on two new responses per prompt; the better one is chosen.

Differences from the paper: any reward can score the responses, not only an AI's preference. The update skips
pairs with equal scores; the paper takes the first response as chosen.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch.nn.functional import logsigmoid

from rlflow import flow, leave_one_out, loss, row, row_sum, stage


@dataclass(frozen=True)
class OnlineDPO:
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    beta: Annotated[float, Gt(0)] = 0.1  # how strongly the loss keeps the policy near the reference
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step, over all ranks; a pair is two


@stage(gives={"sign": row(torch.float32)}, rows="group")
def compare(scores, group):
    """Return 1 for the response with the higher score in each pair, and -1 for the other response. If the
    scores are equal, or one is missing, both get NaN, and the update skips the pair."""
    sign = (scores - leave_one_out(scores, group)).sign()
    return torch.where(sign == 0, torch.nan, sign), {"tied": (sign == 0).float()}


@loss(rows="group")
def prefer(new, ref_logprobs, sign, mask, *, beta):
    margin = sign * row_sum(new.logprobs - ref_logprobs, mask)
    gap = margin[::2] + margin[1::2]
    return -logsigmoid(beta * gap).repeat_interleave(2), {"accuracy": (gap > 0).float(), "gap": gap}


@flow
def online_dpo(prompts, actor, reference, reward, hp=OnlineDPO()):
    batch = actor.generate(prompts, samples=2, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= compare(batch)
    batch |= reference.logprobs(batch, gives="ref_logprobs")
    actor.update(batch, prefer, beta=hp.beta, mean="rows", epochs=hp.epochs, minibatch=hp.minibatch)
