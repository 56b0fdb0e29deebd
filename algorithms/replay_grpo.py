"""GRPO with replay: each update also learns from groups of earlier iterations (RePO, Li et al. 2025).

A buffer keeps groups of responses with the log-probs and scores that they got when they were sampled. Each
iteration draws some of them, more likely those whose scores differ, as in the selective sample replay of
VL-Rethinker (Wang et al. 2025). So an update of the same size needs fewer new tokens. Older weights sampled the
replayed groups: truncated importance weights correct for this, from the weights that sampled each token to the
weights before the update, as they also do for the mismatch between sampler and trainer (Yao et al. 2025). The
ratio of the loss is to the weights before the update. Differences from the papers: RePO draws from the same
prompt's earlier responses and adds a second loss. Here, complete groups are drawn, and new and replayed rows
share one loss.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from rlflow import (
    buffer,
    clipped_gain,
    compare,
    concat,
    flow,
    group,
    group_std,
    loss,
    stage,
    truncated_weights,
)


@dataclass(frozen=True)
class ReplayGRPO:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    replayed: Annotated[int, Ge(0)] = 64  # groups of earlier iterations in each update
    kept: Annotated[int, Ge(1)] = 512  # groups in the buffer
    age: Annotated[int, Ge(1)] = 8  # iterations after which a group is no longer replayed
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights from the sampling weights
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@stage(gives={"spread": group("float32")}, rows="group")
def spread(scores, group):
    """Return the deviation of each group's scores. It is 0 for groups that an update can't learn from."""
    return group_std(scores, group)


@loss
def policy_loss(new, logprobs, advantages, weights, *, clip):
    ratio = (new.logprobs - logprobs).exp()
    return -weights * clipped_gain(ratio, advantages, clip, clip), {"clipped": (ratio - 1).abs() > clip}


@flow(keeps=lambda hp: {"past": buffer(groups=hp.kept, max_age=hp.age, evict="spread")})
def replay_grpo(prompts, actor, reward, past, hp=ReplayGRPO()):
    old = past.draw(groups=hp.replayed, weight="spread")
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    past.put(batch | spread(batch), also=("spread",))
    both = concat(batch, old)
    both |= compare(both)
    both |= actor.logprobs(both)
    both |= truncated_weights(both, cap=hp.is_cap)
    actor.update(both, policy_loss, clip=hp.clip, epochs=hp.epochs, minibatch=hp.minibatch)
