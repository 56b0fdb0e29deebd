"""PPO with an adaptive KL coefficient (Ziegler et al. 2019, section 2.2). `beta` rises while the KL of the
policy to the reference is above `target_kl`, and falls while it is below.

Nothing else differs from PPO (ppo.py). `beta` is part of the flow's state, which is saved and resumed with
the run. The differences from the paper are those of PPO. In addition, `horizon` limits how fast beta changes,
as in the authors' code: over `horizon` rows, by at most about a fifth.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt

from rlflow import RANK0, adapted_beta, flow, gae, kl, place_last, row_sum, stage, truncated_weights
from rlflow.algorithms.ppo import PPO, normalise, policy_loss, value_loss


@dataclass(frozen=True)
class AdaptivePPO(PPO):
    beta: Annotated[float, Gt(0)] = 0.05  # KL coefficient at the start, per nat
    # target for the KL of a complete response to the reference, in nats
    target_kl: Annotated[float, Gt(0)] = 6.0
    horizon: Annotated[float, Gt(0)] = 10000  # rows over which beta changes by about a fifth at most


@stage(gives="rewards")
def charge_kl(scores, logprobs, mask, ref_logprobs, beta):
    return place_last(scores, mask) - torch.where(mask, beta * kl(logprobs, ref_logprobs, "k1"), 0.0)


@stage(gives="beta", dispatch=RANK0)
def adapt(beta, logprobs, ref_logprobs, mask, *, target, horizon):
    observed = row_sum(kl(logprobs, ref_logprobs, "k1"), mask).mean()
    return adapted_beta(beta, observed, target=target, rate=min(1.0, len(mask) / horizon)), {
        "kl": observed,
        "beta": beta,
    }


@flow(state=lambda hp: {"beta": hp.beta})
def ppo_adaptive(prompts, actor, critic, reference, reward, hp=AdaptivePPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= critic.values(batch)
    batch |= charge_kl(batch)
    adapt(batch, target=hp.target_kl, horizon=hp.horizon)  # sets beta for the next iteration
    batch |= gae(batch, gamma=hp.gamma, lam=hp.lam)
    batch |= normalise(batch)
    critic.update(
        batch, value_loss, clip=hp.value_clip, huber=hp.value_huber, epochs=hp.epochs, minibatch=hp.minibatch
    )
    actor.update(
        batch,
        policy_loss,
        clip=hp.clip,
        high=hp.clip_high,
        dual=hp.dual_clip,
        epochs=hp.epochs,
        minibatch=hp.minibatch,
        after=hp.warmup,
    )
