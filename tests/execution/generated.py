"""Flows of random shapes: follow-ups, choices and joins in any order that the contract allows, and an update
at the end.
"""

import random
import time

import torch
from hypothesis import strategies as st

from rlflow import (
    ask,
    choose,
    concat,
    ema,
    flow,
    group,
    group_mean,
    loss,
    repeat,
    row,
    stage,
    table,
    text,
    token,
    truncated_weights,
)
from rlflow.training.loss_rows import WITH_GROUP, broken_columns, group_of, with_groups

# the steps of a shape come from these
STEPS = ("coin", "best", "top", "ask", "after", "half", "cut", "join", "joined", "up")
SHAPES = {
    "source": st.sampled_from(["prompts", "chosen", "groups", "picked", "kept"]),
    "samples": st.integers(2, 3),
    "steps": st.lists(st.sampled_from(STEPS), max_size=4),
    "modulus": st.integers(2, 5),
    "of_groups": st.booleans(),
    "twice": st.booleans(),
    "minibatch": st.sampled_from([None, 3]),
    "remembers": st.booleans(),
}


@loss(unrewarded="rows of a drawn flow may be thrown away")
def likelihood(new, worth, weights, policy_version):
    return -new.logprobs * worth[:, None] * weights, {}


@loss(rows="group", unrewarded="rows of a drawn flow may be thrown away")
def likelihood_of_groups(new, worth, weights, policy_version):
    return -new.logprobs * worth[:, None] * weights, {}


@stage(gives={"coin": row("bool")})
def of_prompts(prompt_tokens, *, modulus):
    return prompt_tokens[:, 0] % 7 % modulus != 1


@stage(gives={"coin": row("bool")})
def of_rows(scores, *, modulus):
    return (scores * 1e6).long() % modulus != 1


@stage(gives="keep", rows="group")
def some_groups(scores, group):
    return group_mean(scores, group) > 0.4


@stage(gives={"question": text})
def again(completion):
    return [f"again {c}" for c in completion]


@stage(gives={"half": row("int64")})
def half(mask):
    return mask.sum(1) // 2


@stage(gives={"cut": token("bool")})
def third(mask):
    return mask & (torch.arange(mask.shape[1]) % 3 == 1)


@stage(gives={"value": group("float32")}, rows="group")
def mean_score(scores, group):
    return group_mean(scores, group)


@stage(gives={"bucket": row("int64")})
def bucket(prompt_id):
    """Return a key that prompts of several iterations share."""
    return prompt_id % 3


@stage(gives={"count": row("float32"), "level": row("float32"), "best": row("float32")})
def outcome(scores):
    return torch.ones_like(scores), scores, scores


@stage(gives={"worth": row("float32")})
def worth_of(scores, value=None, level=None, count=None, *, modulus):
    known = scores if value is None or value.ndim > 1 else torch.where(value.isnan(), scores, value)
    known = known if level is None else known - level + 0.01 * count
    return torch.where((known * 1e6).long() % modulus == 0, torch.nan, known)


def without(rows, *names):
    """Return the rows without columns of these names, so that a stage can give them."""
    return rows.drop(*(name for name in names if name in rows.columns))


def drawn(source, samples, steps, modulus, of_groups, twice, minibatch, remembers=False):
    """Return a flow.

    source: the prompts of the sampling: all, chosen ones, or a `repeat` of groups or of prompts. twice:
    whether an update also learns from the first rows. remembers: whether rows read what earlier iterations
    wrote into a table.
    """

    def first(prompts, actor, reward):
        rows = actor.generate(prompts, samples=samples, max_tokens=5)
        return rows | reward(rows)

    def sampled(prompts, actor, reward):
        if source in ("groups", "picked"):

            def body(fresh):
                rows = first(fresh, actor, reward)
                rows |= some_groups(rows)
                return choose(rows | of_rows(rows, modulus=modulus), "coin") if source == "picked" else rows

            return repeat(body, prompts, groups=2, tries=2)
        if source == "kept":
            prompts = repeat(
                lambda fresh: choose(fresh | of_prompts(fresh, modulus=modulus), "coin"),
                prompts,
                groups=2,
                tries=2,
            )
        elif source == "chosen":
            prompts = choose(prompts | of_prompts(prompts, modulus=modulus), "coin")
        return first(prompts, actor, reward)

    def asked(rows, step):
        if step == "ask":
            return ask(without(rows, "question") | again(rows), "question")
        if step == "after":
            return ask(without(rows, "question") | again(rows), "question", after="tokens")
        return ask(without(rows, step) | (half if step == "half" else third)(rows), tokens_until=step)

    def chosen(rows, step):
        if step == "coin":
            return choose(without(rows, "coin") | of_rows(rows, modulus=modulus), "coin")
        return choose(
            rows, top="scores", count=1 if step == "best" else 3, per="group" if step == "best" else "batch"
        )

    def applied(rows, before, step, actor, reward):
        """Return the rows after a step, and the rows before it if the step can return to them."""
        if step in ("coin", "best", "top"):
            return chosen(rows, step), rows if before is None else before
        if step in ("join", "joined"):
            names = (
                "prompt",
                "answer",
                "prompt_tokens",
                "tokens",
                "mask",
                "completion",
                "sampled_logprobs",
                "scores",
                "temperature",
                "policy_version",
                *(("bucket",) if remembers else ()),
            )
            parts = [batch.select(*names) for batch in (rows, before) if batch is not None]
            return (
                concat(*(parts if step == "join" else reversed(parts))) if len(parts) == 2 else rows
            ), None
        if step == "up":
            return (without(before, "value") | mean_score(rows), None) if before is not None else (rows, None)
        more = actor.generate(without(asked(rows, step), "scores"), samples=2, max_tokens=4)
        return more | reward(more), rows

    @flow(keeps=lambda hp: {"seen": table(key="bucket", count=0.0, level=0.5, best=0.0)})
    def generated(prompts, actor, reward, seen):
        if remembers and source not in ("groups", "picked", "kept"):
            prompts |= bucket(prompts)
        rows = start = sampled(prompts, actor, reward)
        if remembers and source in ("groups", "picked", "kept"):
            rows = start = rows | bucket(rows)
        before = None
        for step in steps:
            rows, before = applied(rows, before, step, actor, reward)
        for number, batch in enumerate([rows, start] if twice else [rows]):
            if remembers:
                batch |= seen.read(batch)
            batch |= worth_of(batch, modulus=modulus)
            batch |= actor.logprobs(batch)
            batch |= truncated_weights(batch, cap=2.0)
            actor.update(
                batch, likelihood_of_groups if of_groups and not number else likelihood, minibatch=minibatch
            )
        if remembers:
            seen.write(rows | outcome(rows), count="add", level=ema(0.5), best="max")

    return generated


METHODS = ("stage", "reward", "forward", "ask", "choose", "concat")


def slowed(engine, seed):
    """Delay each call of these methods of the engine by a time that depends on the seed."""
    drawn = random.Random(seed)
    for method in METHODS:
        setattr(engine, method, _late(getattr(engine, method), drawn))


def _late(call, drawn):
    def late(*args, **options):
        time.sleep(drawn.choice([0.0, 0.0, 0.02]))
        return call(*args, **options)

    return late


class Seen:
    """Sampled rows and training rows, recorded at the generator and at the updates."""

    def __init__(self, engine):
        self.rows = self.tokens = 0
        self.batches = []
        for model in engine.models.values():
            model.generator.generate = self.sampling(model.generator.generate)
            model.trainer.update = self.updating(model.trainer.update)

    def sampling(self, generate):
        def counted(*args):
            rows = generate(*args)
            self.rows, self.tokens = self.rows + len(rows), self.tokens + len(rows.data["tokens"].value)
            return rows

        return counted

    def updating(self, update):
        def seen(batch, loss, **options):
            self.batches.append((batch, loss))
            return update(batch, loss, **options)

        return seen

    @property
    def learned(self):
        """Return the tokens of each row that an update learned from, by its path, without rows that another
        update learned from before.
        """
        found = {}
        for batch, of in self.batches:
            broken = broken_columns(batch, of)
            broken = with_groups(broken, group_of(batch), WITH_GROUP) if of.rows == "group" else broken
            lengths = batch.data["tokens"].lengths.tolist()
            found |= {
                tuple(path): length
                for path, length, bad in zip(batch.axis.keys.tolist(), lengths, broken.tolist(), strict=True)
                if not bad
            }
        return found


def total(counts):
    rows, tokens = zip((0, 0), *((count.rows, count.tokens) for count in counts), strict=True)
    return sum(rows), sum(tokens)


def assert_counted(accounts, seen):
    """Check that the accounts count the generator's rows as sampled, exactly once, and give each an outcome.

    Prompts chosen by a `repeat` count separately, without tokens.
    """
    assert all(account.closes for account in accounts)
    sampled = total(
        count for account in accounts for source, count in account.sampled.items() if ".generate" in source
    )
    assert sampled == (seen.rows, seen.tokens)
    ends = [
        (end, count)
        for account in accounts
        for (source, end), count in account.ends.items()
        if ".generate" in source
    ]
    opened = total(
        count for account in accounts for source, count in account.opened.items() if ".generate" in source
    )
    assert total(count for _, count in ends) == (sampled[0] + opened[0], sampled[1] + opened[1])
    assert all(end.node for end, _ in ends)


def assert_numbered(batch):
    """Check that each row has its own path, and that the rows of a group are adjacent with a unique number."""
    paths = batch.axis.keys.tolist()
    assert len(set(map(tuple, paths))) == len(paths)
    if "group" in batch:
        runs = torch.unique_consecutive(batch["group"])
        assert len(runs) == len(set(runs.tolist())) == batch.axis.groups
