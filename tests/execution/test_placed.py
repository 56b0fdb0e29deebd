"""Tokens that a stage's own mask leaves out, and rows that a stage puts in the place of others, in the account of an iteration."""

import torch

from rlflow import choose, flow, loss, row, stage, token
from rlflow.execution.account import Account, Count, End, Fate
from rlflow.passes import plan
from rlflow.plan import Streaming
from rlflow.runs.fates import fates_text

TRAINED = End(Fate.TRAINED, "actor.update")


@loss
def likelihood(new):
    return -new.logprobs


@stage(gives="mask")
def first_token(mask):
    kept = torch.zeros_like(mask)
    kept[:, :1] = mask[:, :1]
    return kept


@stage(gives={"tokens": token(torch.int64), "swapped": row("bool")})
def swap(tokens, scores):
    """Another first token for each second row."""
    other, odd = tokens.clone(), torch.arange(len(tokens)) % 2 == 1
    other[odd, 0] += 1
    return other, odd


@flow
def masked(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    actor.update(batch | first_token(batch), likelihood)


@flow
def replaced(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    actor.update(batch | swap(batch), likelihood)


@flow
def chosen(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= swap(batch)
    actor.update(choose(batch, "swapped"), likelihood)


@flow
def beside(prompts, actor, reward):
    """What a stage gives is only read, and the update has the tokens that were sampled."""
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    actor.logprobs(batch | swap(batch))
    actor.update(batch, likelihood)


def account(world, made):
    found = world(made).compiled(3).account
    assert found.closes
    assert Account.from_json(found.as_json()) == found
    return found


def test_masked_tokens_are_left_out_by_the_stage_and_their_rows_trained_on(world):
    found = account(world, masked)
    sampled = found.sampled["actor.generate"]
    assert found.ends["actor.generate", TRAINED] == Count(3, 6, 6)
    assert found.ends["actor.generate", End(Fate.LEFT_OUT, "first_token", "masked")] == Count(0, 0, sampled.tokens - 6)
    assert f"left out at first_token: masked: {sampled.tokens - 6} tokens" in fates_text(found)


def test_rows_that_a_stage_put_in_the_place_of_others_are_its_own(world):
    found = account(world, replaced)
    assert found.placed["swap"].rows == 3
    assert found.ends["swap", TRAINED].rows == 3
    assert found.ends["actor.generate", TRAINED].rows == 3
    assert found.ends["actor.generate", End(Fate.LEFT_OUT, "swap", "replaced")].rows == 3
    assert f"swap: 3 rows of {found.placed['swap'].tokens} tokens in the place of sampled ones" in fates_text(found)


def test_they_are_so_where_rows_are_scored_chunk_by_chunk(world):
    run = world(replaced)
    made = plan(run.program, streaming=Streaming(3, frozenset({"actor"}), frozenset({"reward"})))
    assert made.pieces
    assert run.executor.run(made, run.stream.take(3)).account == account(world, replaced)


def test_they_are_so_where_some_are_chosen_of_them(world):
    found = account(world, chosen)
    assert {(source, end.fate, end.cause): count.rows for (source, end), count in found.ends.items()} == {
        ("swap", Fate.TRAINED, ""): 3, ("actor.generate", Fate.LEFT_OUT, "replaced"): 3, ("actor.generate", Fate.LEFT_OUT, "not chosen"): 3}


def test_rows_of_a_stage_that_no_update_is_given_replace_nothing(world):
    found = account(world, beside)
    assert not found.placed
    assert found.ends["actor.generate", TRAINED].rows == 6
