"""Reward-ranked fine-tuning, RAFT (Dong et al. 2023).

Maximum likelihood on the best responses of each group, without ratio, baseline or reference. Differences from
the paper: every iteration samples with the policy that the previous iteration trained. If `mixed` is set,
groups with equal scores are skipped, because their best response is no better than the others.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from rlflow import choose, flow, group_std, loss, row, stage


@dataclass(frozen=True)
class RAFT:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    best: Annotated[int, Ge(1)] = 1  # responses of each group to learn from: the ones with the highest scores
    mixed: bool = True  # learn only from groups with unequal scores
    epochs: Annotated[int, Ge(1)] = 1  # passes over the chosen rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step, over all ranks


@stage(gives={"mixed": row("bool")}, rows="group")
def unequal(scores, group):
    """Return whether the scores of each row's group differ by more than rounding error."""
    return group_std(scores, group) > 1e-6


@loss(stale_ok="the best responses are worth imitating, whichever weights have sampled them")
def likelihood(new):
    return -new.logprobs, {"probability": new.logprobs.exp()}


@flow
def raft(prompts, actor, reward, hp=RAFT()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    if hp.mixed:
        batch = choose(batch | unequal(batch), "mixed")
    best = choose(batch, top="scores", count=hp.best, per="group")
    actor.update(best, likelihood, epochs=hp.epochs, minibatch=hp.minibatch)
