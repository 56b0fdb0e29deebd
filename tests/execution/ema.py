"""A moving-average baseline, a controller of entropy, and a schedule of its bonus: the run computes its
sampling settings as it continues.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le

from rlflow import RANK0, flow, loss, masked_mean, scalar, stage, truncated_weights


@dataclass(frozen=True)
class EMA:
    samples: Annotated[int, Ge(1)] = 2
    max_tokens: Annotated[int, Ge(1)] = 6
    decay: Annotated[float, Ge(0), Le(1)] = 0.9  # for the baseline
    bonus: Annotated[float, Ge(0)] = 0.05  # entropy bonus at the start; 0 at the end
    controlled: bool = (
        True  # the temperature follows the entropy; otherwise it falls with the progress of the run
    )
    target: float = 2.0  # target of the controller, in nats per token


@stage(gives={"baseline": scalar(torch.float32)}, dispatch=RANK0)
def moved(scores, baseline, *, decay):
    return decay * baseline + (1 - decay) * scores.mean(), {"baseline": baseline}


@stage(gives={"heat": scalar(torch.float32)}, dispatch=RANK0)
def controlled(entropy, mask, heat, *, target):
    return (heat * (1 + 0.1 * (target - masked_mean(entropy, mask)).sign())).clamp(0.5, 1.5), {"heat": heat}


@stage(gives={"heat": scalar(torch.float32)}, dispatch=RANK0)
def cooled(progress):
    return 1.2 - 0.4 * progress, {"progress": progress}


@stage(gives={"bonus": scalar(torch.float32)}, dispatch=RANK0)
def fading(iteration, progress, *, start):
    return start * (1 - progress), {"iteration": iteration}


@stage(gives="advantages")
def above(scores, mask, temperature, *, baseline: Annotated[float, Ge(-10)]):
    return torch.where(mask, (scores - baseline)[:, None], 0.0), {"temperature": temperature}


@loss(new=("logprobs", "entropy"))
def policy_loss(new, logprobs, advantages, weights, policy_version, *, bonus: Annotated[float, Ge(0)]):
    return -weights * (new.logprobs - logprobs).exp() * advantages - bonus * new.entropy, {
        "bonus": bonus,
        "version": policy_version,
    }


@flow(state=lambda hp: {"baseline": 0.0} | ({"heat": 1.0} if hp.controlled else {}))
def ema(prompts, actor, reward, hp=EMA()):
    heat = prompts["heat"] if hp.controlled else cooled(prompts)["heat"]
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens, temperature=heat)
    batch |= reward(batch)
    batch |= actor.logprobs(batch, gives=("logprobs", "entropy"))
    batch |= truncated_weights(batch, cap=2.0)
    batch |= above(batch, baseline=batch["baseline"])
    batch |= fading(batch, start=hp.bonus)
    moved(batch, decay=hp.decay)
    if hp.controlled:
        controlled(batch, target=hp.target)
    actor.update(batch, policy_loss, bonus=batch["bonus"], minibatch=5)
