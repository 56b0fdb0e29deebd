"""Flows with the features of an algorithm: repetition, state, a greedy baseline, randomness, every dispatch
mode, warm-up.
"""

import torch

from rlflow import (
    ALL,
    RANK0,
    choose,
    concat,
    flow,
    group_mean,
    loss,
    place_last,
    repeat,
    row,
    scalar,
    stage,
    table,
    truncated_weights,
)


@loss
def policy_loss(new, logprobs, advantages):
    return (logprobs - new.logprobs) * advantages, {"moved": (new.logprobs - logprobs).abs()}


@loss(new="values")
def value_loss(new, values):
    return (new.values - values).square(), {}


@stage(gives="advantages", rows="group")
def centre(scores, group, mask):
    return torch.where(mask, (scores - group_mean(scores, group))[:, None], 0.0), {"spread": scores.std()}


@stage(gives="advantages")
def over_baseline(scores, baseline, mask):
    return torch.where(mask, (scores - baseline)[:, None], 0.0)


@stage(gives="keep", rows="group")
def above(scores, group, bar):
    return group_mean(scores, group) > bar


@stage(gives={"bar": scalar("float32")}, dispatch=RANK0)
def move_bar(scores, bar, *, rate):
    return bar + rate * (scores.mean() - bar), {"bar": bar}


@stage(gives={"noise": row("float32")})
def noise(scores, *, generator):
    return torch.stack([torch.rand((), generator=one) for one in generator]) if generator else scores


@stage(gives={"shift": scalar("float32")}, dispatch=RANK0)
def shift(scores, *, generator):
    return torch.rand((), generator=generator)


@stage(gives={"count": scalar("float32")}, dispatch=ALL)
def count(scores):
    return torch.tensor(float(len(scores)))


@stage(gives="rewards")
def mix(scores, noise, shift, count, mask):
    assert isinstance(count, tuple)
    return place_last(scores + noise + shift + count[0], mask)


@stage(gives="advantages", dispatch=RANK0)
def total(rewards, mask):
    return rewards - rewards.mean()


@flow(state=lambda hp: {"bar": 0.45})
def adaptive(prompts, actor, reward):
    """A stage sets state before a repeat, the body reads it, and a stage sets it again."""

    def body(fresh):
        rows = actor.generate(fresh, samples=3, max_tokens=5)
        rows |= reward(rows)
        return rows | above(rows)

    probe = actor.generate(prompts, samples=2, max_tokens=3)
    probe |= reward(probe)
    move_bar(probe, rate=0.5)
    batch = repeat(body, prompts, groups=4, tries=6)
    batch |= actor.logprobs(batch)
    batch |= centre(batch)
    actor.update(batch, policy_loss, minibatch=5)
    move_bar(batch, rate=0.1)


@flow
def remax(prompts, actor, reward):
    """A greedy response per prompt is the baseline of its samples."""
    batch = actor.generate(prompts, samples=3, max_tokens=5)
    greedy = actor.generate(prompts, max_tokens=5, temperature=0)
    batch |= reward(batch)
    batch |= reward(greedy, gives="baseline")
    batch |= actor.logprobs(batch)
    batch |= over_baseline(batch)
    actor.update(batch, policy_loss)


@flow
def chancy(prompts, actor, reward):
    """Randomness per row and for the batch, with one value per rank, and with one for all."""
    batch = actor.generate(prompts, samples=2, max_tokens=5)
    batch |= reward(batch)
    batch |= noise(batch)
    batch |= shift(batch)
    batch |= count(batch)
    batch |= mix(batch)
    batch |= total(batch)
    batch |= actor.logprobs(batch)
    actor.update(batch, policy_loss)


@flow
def warm(prompts, actor, critic, reward):
    """The critic learns first; then two updates of one model and another sampling after them."""
    batch = actor.generate(prompts, samples=2, max_tokens=5)
    batch |= reward(batch)
    batch |= critic.values(batch)
    batch |= actor.logprobs(batch, gives=("logprobs", "entropy"))
    batch |= truncated_weights(batch, cap=2.0, gives="returns")
    batch |= centre(batch)
    critic.update(batch, value_loss, epochs=2)
    actor.update(batch, policy_loss, after=2)
    actor.update(batch, policy_loss, after=1, mean="row-tokens")
    again = actor.generate(prompts, samples=2, max_tokens=5)
    again |= reward(again)
    again |= actor.logprobs(again)
    again |= centre(again)
    actor.update(again, policy_loss)


@stage(gives="advantages")
def maybe(scores, mask, values=None, ref_logprobs=None, bar=None):
    """Each column that isn't there changes the result."""
    weight = 1.0 + (values is None) + 2.0 * (ref_logprobs is None) + (0.0 if bar is None else bar)
    return torch.where(mask, weight * scores[:, None], 0.0)


@stage(gives={"hard": row("bool")})
def below(scores, *, bar):
    return scores < bar


@stage(gives={"extra": row("float32")}, rows="group")
def extra(scores, group):
    return group_mean(scores, group)


@stage(gives="weights")
def ones(mask, extra=None, *, generator):
    return torch.where(mask, 1.0 if extra is None else extra[:, None], 0.0)


@flow(state=lambda hp: {"bar": 0.45})
def scheduled(prompts, actor, critic, reference, reward):
    """Models, rewards, a repeat, a state and joined rows that are only due in some iterations."""

    def body(fresh):
        rows = actor.generate(fresh, samples=2, max_tokens=4)
        rows |= reward(rows)
        rows |= extra(rows, every=4, after=1)
        return rows | ones(rows) | above(rows)

    batch = actor.generate(prompts, samples=3, max_tokens=5)
    batch |= reward(batch)
    batch |= actor.logprobs(batch)
    batch |= critic.values(batch, every=2)
    batch |= reference.logprobs(batch, gives="ref_logprobs", every=3, after=1)
    batch |= move_bar(batch, rate=0.5, every=2, after=1)
    batch |= maybe(batch)
    critic.update(batch, value_loss, every=2)
    more = repeat(body, prompts, groups=2, tries=5, every=2, after=1)
    more |= actor.logprobs(more, every=2, after=1)
    more |= maybe(more, every=2, after=1)
    both = concat(batch.drop("values"), more)
    actor.update(both, policy_loss, every=2, after=1)
    again = actor.generate(prompts, samples=2, max_tokens=5, every=3)
    again |= reward(again, every=3)
    again |= actor.logprobs(again, every=3)
    again |= below(again, bar=batch["bar"], every=3)
    hard = choose(again, "hard")
    hard |= maybe(hard, every=3)
    actor.update(hard, policy_loss, every=3)
    actor.update(batch, policy_loss)


@flow
def hopeless(prompts, actor, reward):
    """The repeat keeps no group."""

    def body(fresh):
        rows = actor.generate(fresh, samples=2, max_tokens=3)
        rows |= reward(rows)
        return rows | never(rows)

    batch = repeat(body, prompts, groups=2, tries=3)
    batch |= actor.logprobs(batch)
    batch |= centre(batch)
    actor.update(batch, policy_loss)


@stage(gives="keep", rows="group")
def never(scores, group):
    return scores > 2


@stage(gives={"odd": row("bool")})
def odd(prompt_tokens, iteration):
    return (prompt_tokens[:, 0] + iteration) % 2 == 1, {"iteration": iteration}


@stage(gives={"bar": scalar("float32")}, dispatch=RANK0)
def schedule(iteration, progress):
    return 0.2 + 0.1 * progress, {"progress": progress, "iteration": iteration}


@stage(gives="keep", rows="group")
def enough(scores, group, iteration, progress):
    return group_mean(scores, group) > 0.1 * progress, {"progress": progress, "iteration": iteration}


@loss
def fading_loss(new, logprobs, advantages, policy_version, iteration, progress):
    return (logprobs - new.logprobs) * advantages * (1 - progress), {"iteration": iteration}


@flow
def clocked(prompts, actor, reward):
    """The flow reads the iteration and the progress before sampling, in the body of a repeat, in a stage for
    all rows, and in a loss.
    """

    def body(fresh):
        rows = actor.generate(fresh, samples=3, max_tokens=5)
        rows |= reward(rows)
        return rows | enough(rows)

    some = choose(prompts | odd(prompts), "odd")
    first = actor.generate(some, samples=2, max_tokens=3)
    first |= reward(first)
    batch = repeat(body, prompts, groups=4, tries=6)
    batch |= schedule(batch)
    batch |= actor.logprobs(batch)
    batch |= centre(batch)
    actor.update(batch, fading_loss, minibatch=5)
    first |= actor.logprobs(first)
    first |= centre(first)
    actor.update(first, fading_loss)


@stage(gives={"count": row("float32")})
def counted(scores):
    return torch.ones_like(scores)


@stage(gives="advantages")
def over_count(scores, mask, count=None):
    return torch.where(mask, (scores if count is None else scores - 0.1 * count)[:, None], 0.0)


@flow(keeps=lambda hp: {"seen": table(count=0.0)})
def forgetful(prompts, actor, reward, seen):
    """Sample more rows in every second iteration, and count the prompts of these rows only."""
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    more = actor.generate(prompts, samples=1, max_tokens=4, every=2, after=1)
    more |= reward(more, every=2, after=1)
    batch |= seen.read(batch)
    seen.write(more | seen.read(more).drop("count") | counted(more, every=2, after=1), count="add")
    batch |= over_count(batch)
    batch |= actor.logprobs(batch)
    actor.update(batch, policy_loss)
