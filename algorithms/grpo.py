"""Group Relative Policy Optimization, GRPO (Shao et al. 2024), with settings for Dr. GRPO (Liu et al. 2025).

Differences from the GRPO paper: the loss is the mean over all tokens of the minibatch (DAPO, Yu et al. 2025;
the paper has `mean="row-tokens"`). The KL term exists only if beta > 0, and its default estimator is k2 (the
paper has `estimator="k3"`). Truncated importance weights correct the mismatch between sampler and trainer
(Yao et al. 2025). For Dr. GRPO, set `deviation=False` and `mean="constant"`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from rlflow import clipped_gain, compare, flow, kl_penalty, loss, truncated_weights


@dataclass(frozen=True)
class GRPO:
    samples: Annotated[int, Ge(2)] = 8  # responses per prompt
    max_tokens: Annotated[int, Ge(1)] = 1024  # longest response
    # divide advantages by the standard deviation of the group's scores; Dr. GRPO does not
    deviation: bool = True
    beta: Annotated[float, Ge(0)] = 0.0  # KL coefficient in the loss; 0 needs no reference
    # KL estimator; gradient of k2: right on-policy, k3: forward KL, k3-weighted: right off-policy too
    estimator: Literal["k2", "k3", "k3-weighted"] = "k2"
    # average the loss over all tokens, over each row's tokens first, or divide its sum by rows x max_tokens
    mean: Literal["tokens", "row-tokens", "constant"] = "tokens"
    clip: Annotated[float, Gt(0)] = 0.2  # trust region of the policy ratio
    is_cap: Annotated[float, Gt(0)] = 2.0  # cap on the importance weights between sampler and trainer
    epochs: Annotated[int, Ge(1)] = 1  # passes over the rows of an iteration
    minibatch: Annotated[int, Ge(1)] = 256  # rows per optimizer step, over all ranks


@loss
def policy_loss(new, logprobs, advantages, weights, ref_logprobs=None, *, clip, beta, estimator="k2"):
    ratio = (new.logprobs - logprobs).exp()
    charge = 0 if ref_logprobs is None else beta * kl_penalty(new.logprobs, logprobs, ref_logprobs, estimator)
    return charge - weights * clipped_gain(ratio, advantages, clip, clip), {
        "clipped": (ratio - 1).abs() > clip
    }


@flow
def grpo(prompts, actor, reference, reward, hp=GRPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    if hp.beta:
        batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= compare(batch, deviation=hp.deviation)
    mean = hp.max_tokens if hp.mean == "constant" else hp.mean
    actor.update(
        batch,
        policy_loss,
        clip=hp.clip,
        beta=hp.beta,
        estimator=hp.estimator,
        mean=mean,
        epochs=hp.epochs,
        minibatch=hp.minibatch,
    )
