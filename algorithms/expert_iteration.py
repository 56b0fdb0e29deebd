"""Expert iteration for language models (Anthony et al. 2017; Polu et al. 2022).

Maximum likelihood on right responses. A buffer collects them, so the set that the model learns from grows: each
update learns from the right responses of its iteration and from some of those that earlier iterations found.
Differences from Polu et al.: the model isn't trained anew from its first weights when the set has grown, and a
response counts as right by its score, without a search for proofs.
"""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from rlflow import buffer, choose, concat, flow, loss, row, stage


@dataclass(frozen=True)
class ExpertIteration:
    samples: Annotated[int, Ge(1)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    threshold: float = 1.0  # score from which on a response is right
    kept: Annotated[int, Ge(1)] = 16384  # right responses in the set; the oldest leave first
    replayed: Annotated[int, Ge(0)] = 256  # responses of earlier iterations in each update
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 64  # rows per optimizer step, over all ranks


@stage(gives={"right": row("bool")})
def judge(scores, *, threshold):
    """Return whether each response is right. A response with a missing score isn't."""
    right = scores >= threshold
    return right, {"right": right.float()}


@loss(stale_ok="right responses are worth imitating, whichever weights have sampled them")
def likelihood(new):
    return -new.logprobs, {"probability": new.logprobs.exp()}


@flow(keeps=lambda hp: {"solved": buffer(rows=hp.kept)})
def expert_iteration(prompts, actor, reward, solved, hp=ExpertIteration()):
    old = solved.draw(rows=hp.replayed)
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= judge(batch, threshold=hp.threshold)
    new = choose(batch, "right")
    solved.put(new)
    actor.update(concat(new, old), likelihood, epochs=hp.epochs, minibatch=hp.minibatch)
