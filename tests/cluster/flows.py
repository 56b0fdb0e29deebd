"""A flow with a stage of every kind, for pools: modes, randomness, groups, text, metrics, and a mode of its
own."""

from dataclasses import dataclass

import torch

from rlflow import (
    ALL,
    RANK0,
    Batch,
    flow,
    group,
    group_mean,
    loss,
    register_dispatch,
    row,
    scalar,
    stage,
    text,
    token,
)


def by_parity(batch, ranks):
    """Send even rows to the first rank, odd rows to the second."""
    return [batch.rows(torch.arange(len(batch)) % ranks == rank) for rank in range(ranks)]


def interleaved(outputs, batch):
    joined = Batch.concat(outputs)
    order = torch.cat(
        [torch.arange(start, len(batch), len(outputs)) for start in range(len(outputs))]
    ).argsort()
    return Batch(batch.axis, joined.rows(order).data)


PARITY = register_dispatch("PARITY", by_parity, interleaved)


@dataclass(frozen=True)
class Settings:
    samples: int = 3
    max_tokens: int = 7


@stage(gives={"noise": row(torch.float32)})
def noisy(tokens, *, generator):
    return torch.stack([torch.rand(1, generator=each)[0] for each in generator])


@stage(gives={"shown": text})
def upper(completion):
    return [item.upper() for item in completion]


@stage(gives="advantages", rows="group")
def centred(scores, group, mask, temperature):
    return torch.where(mask, (scores - group_mean(scores, group))[:, None], 0.0), {
        "spread_max": scores,
        "heat": temperature,
    }


@stage(gives={"best": group(torch.float32)}, rows="group")
def best(scores, group):
    return torch.stack([scores[group == number].max() for number in group.tolist()])


@stage(gives={"total": scalar(torch.float32)}, dispatch=RANK0)
def total(advantages, mask):
    return torch.where(mask, advantages, 0.0).double().sum()


@stage(gives={"ranks": scalar(torch.float32)}, dispatch=ALL)
def every(total):
    return total


@stage(gives={"doubled": token(torch.float32)}, dispatch=PARITY)
def double(advantages, mask):
    return 2 * advantages, {"rows": torch.ones(len(mask))}


@stage(gives={"report": row(torch.float32)})
def report(
    noise: row(torch.float32),
    shown: text,
    best: group(torch.float32),
    doubled: token(torch.float32),
    total: scalar(torch.float32),
    mask,
):
    return (
        noise
        + best
        + torch.where(mask, doubled, 0.0).sum(1)
        + total
        + torch.tensor([float(len(item)) for item in shown])
    )


@loss
def policy_loss(new, logprobs, advantages):
    return -(new.logprobs - logprobs).exp() * advantages, {}


@flow
def kinds(prompts, actor, reward, hp=Settings()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= noisy(batch)
    batch |= upper(batch)
    batch |= centred(batch)
    batch |= best(batch)
    batch |= total(batch)
    batch |= every(batch)
    batch |= double(batch)
    batch |= report(batch)
    actor.update(batch, policy_loss, minibatch=5)
    return batch


@loss
def likelihood(new):
    return -new.logprobs, {"right": 1.0}


@stage(gives={"right": row(torch.bool)})
def some(mask):
    return mask.sum(1) % 2 == 0


@flow
def two_losses(prompts, actor, reward, hp=Settings()):
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= centred(batch)
    batch |= some(batch)
    actor.update(
        batch,
        (policy_loss, likelihood),
        scale=(1.0, 0.3),
        mean=("tokens", "row-tokens"),
        where=(None, "right"),
        minibatch=5,
    )


@dataclass(frozen=True)
class Long:
    samples: int = 8
    max_tokens: int = 160


@stage(gives="advantages", rows="group")
def less_mean(scores, group, mask):
    return torch.where(mask, (scores - group_mean(scores, group))[:, None], 0.0), {"spread": scores}


@flow
def long_tailed(prompts, actor, reward, hp=Long()):
    """The temperature is so high that lengths are almost geometric: most rows end long before the last
    one."""
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens, temperature=9.0)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= less_mean(batch)
    actor.update(batch, policy_loss, minibatch=16)
