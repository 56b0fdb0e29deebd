"""PPO for a model that acts in turns, with each turn's reward at the end of the turn (Zeng et al. 2025,
"Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Reward Design": MT-PPO).

Only one thing differs from PPO (ppo.py): the environment's reward for a turn is placed at the last token of
that turn. Later turns therefore get no credit for it. The rest of the score is placed at the end of the
response. Without an environment, the complete score is placed there, and the algorithm is PPO. The
differences from the paper are those of PPO.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge

from rlflow import DP_COMPUTE, flow, gae, kl, place_last, row_sum, stage, truncated_weights
from rlflow.algorithms.ppo import PPO, normalise, policy_loss, value_loss


@dataclass(frozen=True)
class TurnPPO(PPO):
    max_tokens: Annotated[int, Ge(1)] = 4096  # longest episode, including messages from the environment


@stage(gives="rewards", dispatch=DP_COMPUTE)
# turn_rewards is absent without an environment that gives them, ref_logprobs when beta is 0
def credit_turns(scores, logprobs, mask, turn_rewards=None, ref_logprobs=None, *, beta):
    earned = torch.zeros_like(logprobs) if turn_rewards is None else turn_rewards
    charge = 0 if ref_logprobs is None else beta * kl(logprobs, ref_logprobs, "k1")
    return earned + place_last(scores - row_sum(earned, mask), mask) - torch.where(mask, charge, 0.0)


@flow
def ppo_turns(prompts, actor, critic, reference, reward, hp=TurnPPO()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=hp.is_cap)
    if hp.beta:
        batch |= reference.logprobs(batch, gives="ref_logprobs")
    batch |= critic.values(batch)
    batch |= credit_turns(batch, beta=hp.beta)
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
