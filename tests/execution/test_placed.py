"""Row accounting of tokens that a stage masks out, and of rows that a stage replaces."""

import json

import pytest
import torch

import rlflow
from rlflow import choose, flow, loss, repeat, row, stage, token
from rlflow.compiler.passes import plan
from rlflow.compiler.plan import Streaming
from rlflow.execution.account import Count, End, RowAccount, RowOutcome
from rlflow.runs.outcomes import outcomes_text

TRAINED = End(RowOutcome.TRAINED, "actor.update")


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
    """Replace the first token of each second row."""
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
    """The flow only reads the stage's rows, and the update gets the sampled tokens."""
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    actor.logprobs(batch | swap(batch))
    actor.update(batch, likelihood)


@stage(gives="keep", rows="group")
def even(group):
    return group % 2 == 0


@flow
def repeated(prompts, actor, reward):
    """Of three prompts the repeat keeps the groups of the first and the last, and one is carried over; the
    stage replaces one row of each group.
    """

    def body(prompts):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= swap(batch)
        return batch | even(batch)

    actor.update(repeat(body, prompts, groups=1, tries=2), likelihood)


@stage(gives={"tokens": token(torch.int64)})
def shift(tokens):
    return tokens + 1


@stage(gives={"picked": row("bool")})
def pick(group):
    return group % 2 == 0


@flow
def wholly(prompts, actor, reward):
    def body(prompts):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch = choose(batch | pick(batch), "picked")
        batch |= shift(batch)
        return batch | even(batch)

    actor.update(repeat(body, prompts, groups=1, tries=2), likelihood)


def account(world, made):
    found = world(made).compiled(3).account
    assert found.closes
    assert RowAccount.from_json(found.as_json()) == found
    return found


def test_masked_out_tokens_are_counted_and_their_rows_trained(world):
    found = account(world, masked)
    sampled = found.sampled["actor.generate"]
    assert found.ends["actor.generate", TRAINED] == Count(3, 6, 6)
    assert found.ends["actor.generate", End(RowOutcome.LEFT_OUT, "first_token", "masked")] == Count(
        0, 0, sampled.tokens - 6
    )
    assert f"left out at first_token: masked: {sampled.tokens - 6} tokens" in outcomes_text(found)


def test_replacement_rows_belong_to_their_stage(world):
    found = account(world, replaced)
    assert found.placed["swap"].rows == 3
    assert found.ends["swap", TRAINED].rows == 3
    assert found.ends["actor.generate", TRAINED].rows == 3
    assert found.ends["actor.generate", End(RowOutcome.LEFT_OUT, "swap", "replaced")].rows == 3
    assert f"swap: 3 rows, {found.placed['swap'].tokens} tokens that no model sampled" in outcomes_text(found)


def test_replacement_rows_of_streamed_scoring_belong_to_their_stage(world):
    run = world(replaced)
    made = plan(run.program, streaming=Streaming(3, frozenset({"actor"}), frozenset({"reward"})))
    assert made.pieces
    assert run.executor.run(made, run.stream.take(3)).account == account(world, replaced)


def test_chosen_replacement_rows_belong_to_their_stage(world):
    found = account(world, chosen)
    assert {(source, end.fate, end.cause): count.rows for (source, end), count in found.ends.items()} == {
        ("swap", RowOutcome.TRAINED, ""): 3,
        ("actor.generate", RowOutcome.LEFT_OUT, "replaced"): 3,
        ("actor.generate", RowOutcome.LEFT_OUT, "not chosen"): 3,
    }


def test_stage_rows_without_an_update_replace_nothing(world):
    found = account(world, beside)
    assert not found.placed
    assert found.ends["actor.generate", TRAINED].rows == 6


def test_replacement_rows_in_a_repeat_belong_to_their_stage(world):
    outcome = world(repeated).compiled(3)
    found = outcome.account
    assert found.closes
    assert (found.sampled["actor.generate"][:2], found.placed["swap"][:2]) == ((3, 6), (0, 3))
    assert {
        (source, end.fate, end.node, end.cause): count[:2] for (source, end), count in found.ends.items()
    } == {
        ("actor.generate", RowOutcome.LEFT_OUT, "swap", "replaced"): (0, 3),
        ("actor.generate", RowOutcome.LEFT_OUT, "repeat.body", "not kept"): (1, 1),
        ("swap", RowOutcome.LEFT_OUT, "repeat.body", "not kept"): (0, 1),
        ("actor.generate", RowOutcome.SURPLUS, "repeat.body", ""): (1, 1),
        ("swap", RowOutcome.SURPLUS, "repeat.body", ""): (0, 1),
        ("actor.generate", RowOutcome.TRAINED, "actor.update", ""): (1, 1),
        ("swap", RowOutcome.TRAINED, "actor.update", ""): (0, 1),
    }
    assert {
        figure.name: value for figure, value in outcome.metrics.items() if figure.node == "repeat.body"
    } == {"tries": 1.0, "kept": 1.0, "seen": 3.0, "surplus": 1.0}


def test_replacing_all_rows_of_a_repeat_keeps_its_counts(world):
    outcome = world(wholly).compiled(3)
    found = outcome.account
    assert found.closes
    assert (found.sampled["actor.generate"][:2], found.placed["shift"][:2]) == ((3, 6), (2, 4))
    assert {(source, end.fate, end.cause): count[:2] for (source, end), count in found.ends.items()} == {
        ("actor.generate", RowOutcome.LEFT_OUT, "replaced"): (2, 4),
        ("actor.generate", RowOutcome.LEFT_OUT, "not chosen"): (1, 2),
        ("shift", RowOutcome.SURPLUS, ""): (1, 2),
        ("shift", RowOutcome.TRAINED, ""): (1, 2),
    }


FLOW = """
import torch
from rlflow import RANK0, flow, loss, repeat, stage, token

@loss(stale_ok="only what becomes of rows is looked at")
def gain(new, scores):
    return -new.logprobs * scores[:, None]

@stage(gives={"tokens": token(torch.int64)}, dispatch=RANK0)
def swap(tokens):
    other = tokens.clone()
    other[1::2, 0] += 1
    return other

@stage(gives="keep", dispatch=RANK0)
def even(group):
    return group % 2 == 0

@flow
def repeated(prompts, actor, reward):
    def body(prompts):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= swap(batch)
        return batch | even(batch)

    batch = repeat(body, prompts, groups=1, tries=2)
    batch |= reward(batch)
    actor.update(batch, gain)
"""


@pytest.mark.slow
def test_ranks_count_replacements_alike(tmp_path):
    file = tmp_path / "flow.py"
    file.write_text(FLOW)
    small = {"backend": "null", "prompts": 3, "iterations": 3, "out": str(tmp_path), "threads": 1}
    kinds = ({}, {"pools": "all=2@threads"}, {"pools": "train=1@threads,rollout=2@threads", "staleness": 1})
    runs = [
        rlflow.run(str(file), name=str(number), **small, **more).folder for number, more in enumerate(kinds)
    ]
    alone, ranks, ahead = (
        [json.loads(line) for line in (folder / "fates.jsonl").read_text().splitlines()] for folder in runs
    )
    assert alone == ranks
    assert all(
        RowAccount.from_json(line).closes and RowAccount.from_json(line).placed["swap"].rows
        for line in (*alone, ahead[0])
    )
    assert {(end["source"], end["fate"]) for line in ahead for end in line["fates"]} >= {
        ("swap", "carried on"),
        ("swap", "trained"),
    }
    assert all(RowAccount.from_json(line).closes for line in ahead)
    assert [list(line["opened"]) for line in ahead] == [[], ["actor.generate", "swap"], []]
