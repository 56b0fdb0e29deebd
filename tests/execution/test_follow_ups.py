"""Rows whose responses are encoded from text."""

import torch

from rlflow import encode, flow, loss
from rlflow.author.batch import Batch
from rlflow.author.node_options import EncodeOptions
from rlflow.execution.account import Count, End, RowOutcome
from rlflow.execution.follow_ups import Asking, encoded_responses

ROWS = Batch.of(prompt_tokens=[[7], [7, 8], [9], [9]], text=["ab", "", "abcd", "c"])
BOTH = EncodeOptions(("actor",), 3)


@loss(unrewarded="the text is what to learn")
def likelihood(new):
    return -new.logprobs


@flow
def taught(prompts, actor):
    actor.update(encode(prompts, "answer", actor), likelihood)


def test_a_response_has_the_tokens_of_its_text(world):
    rows, _ = world(taught).engine.encode(ROWS, EncodeOptions(("actor",)))
    assert rows.data["tokens"].lists() == [[*b"ab"], [*b"abcd"], [*b"c"]]
    assert rows["completion"] == ["ab", "abcd", "c"]
    assert rows["finish"] == ["stop"] * 3
    assert rows["temperature"].tolist() == [1.0] * 3
    assert bool(rows.data["mask"].value.all())
    assert set(rows.data["policy_version"].value.tolist()) == {-1}
    assert all(data.lengths.tolist() == [2, 4, 1] for data in rows.data.values() if data.ragged)


def test_empty_and_overlong_texts_are_skipped_and_counted(world):
    engine = world(taught).engine
    rows, metrics = engine.encode(ROWS, BOTH)
    assert rows["completion"] == ["ab", "c"]
    assert {name: metric.value for name, metric in metrics.items()} == {"empty": 1, "too_long": 1}
    engine.asking = Asking(longest_row=3)  # the model has no room for the third row
    rows, metrics = engine.encode(ROWS, EncodeOptions(("actor",)))
    assert rows["completion"] == ["ab", "c"]
    assert metrics["too_long"].value == 1
    none, _ = engine.encode(ROWS.rows([1, 2]), BOTH)
    assert len(none) == 0
    assert none.data["tokens"].lists() == []


def test_rows_of_prompts_are_groups_of_one_and_other_groups_stay(world):
    engine = world(taught).engine
    rows, _ = engine.encode(ROWS, BOTH)
    assert rows.axis.grouped
    assert rows["group"].tolist() == [0, 3]
    grouped = Batch.of(prompt_tokens=[[7]] * 4, group=[4, 4, 6, 6], text=["a", "", "b", "c"])
    rows, _ = engine.encode(grouped, BOTH)
    assert rows["group"].tolist() == [4, 6, 6]
    assert rows.axis.keys.tolist() == [[4, 0], [6, 0], [6, 1]]


def test_a_text_after_the_beginning_of_a_response_completes_it():
    rows = Batch.of(prompt_tokens=[[7, *b"ab"]], prefix_length=[2], text=["cd"])
    encoded = encoded_responses(Asking(), rows, ())
    assert encoded.data["tokens"].lists() == [[*b"cd"]]
    assert encoded["completion"] == ["abcd"]


def test_messages_are_masked_where_the_assistant_did_not_write():
    asking = Asking(reply=lambda roles, texts: [([1, 2, 3], [True, False, True]) for _ in texts])
    rows = encoded_responses(asking, ROWS.rows([0, 1]), ("actor",))
    assert rows.data["tokens"].lists() == [[1, 2, 3], []]
    assert rows.data["mask"].lists() == [[True, False, True], []]


def test_encoded_rows_are_accounted_for_but_not_as_sampled(world):
    account = world(taught).compiled(3).account
    assert account.closes
    assert not account.sampled
    assert account.placed == {"encode": Count(3, 3, 3)}
    assert account.ends == {("encode", End(RowOutcome.TRAINED, "actor.update")): Count(3, 3, 3)}


def test_a_rewritten_row_keeps_no_column_of_its_old_tokens(world):
    seen = {}

    @flow
    def rewritten(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        seen["before"] = batch | actor.logprobs(batch)
        seen["after"] = encode(seen["before"], "answer", actor)
        actor.update(seen["after"], likelihood)

    world(rewritten).eager(2)
    before, after = seen["before"], seen["after"]
    assert set(before.data) - set(after.data) == {"sampled_logprobs", "logprobs"}
    assert torch.equal(before["scores"], after["scores"])
    assert torch.equal(before["group"], after["group"])
    assert after["completion"] == ["a"] * 4
