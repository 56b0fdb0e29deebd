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


@loss(new="values")
def to_scores(new, scores):
    return (new.values - scores[:, None]).square(), {}


@stage(gives="advantages")
def over_values(scores, mask, values=None, ref_logprobs=None):
    """Each column that isn't due leaves a trace in the weights."""
    baseline = torch.zeros_like(mask, dtype=torch.float32) if values is None else values
    anchor = 0.0 if ref_logprobs is None else 0.1 * ref_logprobs
    return torch.where(mask, scores[:, None] - baseline - anchor, 0.0)


@stage(gives={"bar": scalar(torch.float32)}, dispatch=RANK0)
def moving(scores, bar):
    return 0.5 * bar + 0.5 * scores.mean(), {"bar": bar}


@loss
def clear(new, logprobs, advantages, bar):
    return (logprobs - new.logprobs) * (advantages - bar), {}


@stage(gives={"restart": scalar(torch.bool)}, dispatch=RANK0)
def restarts(scores):
    return torch.tensor(True)


@flow(state=lambda hp: {"bar": 0.25})
def now_and_then(prompts, actor, critic, reference, reward, hp=Settings()):
    """A critic every two iterations, a reference every three, and a cycle of six."""
    batch = actor.generate(prompts, samples=hp.samples, max_tokens=hp.max_tokens)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= critic.values(batch, every=2)
    batch |= reference.logprobs(batch, gives="ref_logprobs", every=3, after=1)
    batch |= over_values(batch)
    moving(batch, every=2, after=1)
    critic.update(batch, to_scores, minibatch=8, every=2)
    batch |= restarts(batch, every=3, after=2)
    actor.update(batch, clear, minibatch=8, fresh_optimizer="restart")
    more = actor.generate(prompts, samples=2, max_tokens=hp.max_tokens, every=3)
    more |= reward(more, every=3)
    more |= actor.logprobs(more, every=3)
    more |= centred(more, every=3)
    actor.update(more, policy_loss, every=3)
