"""The null backend: columns are functions of the row key, so a digest shows a lost, doubled or moved row."""

import time

import pytest
import torch

from rlflow import loss
from rlflow.author.batch import Batch
from rlflow.backends.null import Generator, Score, Trainer
from rlflow.training.protocols import ModelSpec, Sampling


@pytest.fixture
def sampled(prompts):
    return Generator(ModelSpec(None)).generate(prompts(0, 6), Sampling(samples=2, max_tokens=7), [0] * 12)


def test_each_method_gives_its_columns(sampled):
    assert {
        "tokens",
        "mask",
        "completion",
        "finish",
        "sampled_logprobs",
        "temperature",
        "policy_version",
        "group",
    } == set(sampled.columns)
    lengths = sampled.data["tokens"].lengths
    assert 1 <= int(lengths.min()) <= int(lengths.max()) <= 7
    assert all(end == "stop" for end, n in zip(sampled["finish"], lengths.tolist(), strict=True) if n < 7)
    assert "length" in sampled["finish"]
    assert bool((sampled["sampled_logprobs"] <= 0).all())


@pytest.mark.parametrize(
    "changed",
    [
        lambda b: b.rows(range(len(b) - 1)),  # lost
        lambda b: b.rows([0, *range(len(b) - 1)]),  # doubled, and another lost
        lambda b: b.rows([1, 0, *range(2, len(b))]),  # moved
    ],
)
def test_a_digest_of_any_column_shows_a_changed_row(sampled, row_digest, changed):
    other = changed(sampled)
    for name in ("tokens", "sampled_logprobs", "completion"):
        one = Batch.of({name: sampled.data[name].value}) if name == "completion" else sampled.select(name)
        two = Batch.of({name: other.data[name].value}) if name == "completion" else other.select(name)
        assert row_digest(one) != row_digest(two)


def test_the_numbers_of_a_row_do_not_depend_on_its_position(sampled):
    trainer = Trainer(ModelSpec(None))
    whole = trainer.forward(sampled, ("logprobs", "values", "scores"))
    index = [7, 2, 11]
    part = trainer.forward(sampled.rows(index), ("logprobs", "values", "scores"))
    assert torch.equal(part["scores"], whole["scores"][index])
    assert torch.equal(part["values"], whole.rows(index)["values"])
    assert torch.equal(Score()(sampled.rows(index))[0], Score()(sampled)[0][index])


def test_log_probs_match_the_sampling_log_probs(sampled, prompts):
    rows = Batch(sampled.axis, prompts(0, 6).repeat(2).data | sampled.data)
    assert torch.equal(Trainer(ModelSpec(None)).forward(rows)["logprobs"], sampled["sampled_logprobs"])


def test_a_response_continues_after_its_last_token(prompts):
    """A continuation after the first three tokens gives the tokens that were there, so turns of an episode
    differ.
    """
    whole = Generator(ModelSpec(None)).generate(prompts(0, 6), Sampling(max_tokens=7), [0] * 6)
    rows = [index for index, length in enumerate(whole.data["tokens"].lengths.tolist()) if length > 4]
    prefixes = [[index, 1, *whole["tokens"][index, :3].tolist()] for index in rows]
    later = Batch(prompts(0, 6).axis.take(torch.tensor(rows)), Batch.of(prompt_tokens=prefixes).data)
    assert torch.equal(
        Generator(ModelSpec(None)).generate(later, Sampling(max_tokens=1), [0] * len(rows))["tokens"],
        whole["tokens"][rows, 3:4],
    )


def test_other_positions_of_the_data_give_other_rows(prompts):
    generator, sampling = Generator(ModelSpec(None)), Sampling(max_tokens=16)
    first, later = (generator.generate(prompts(start, 4), sampling, [0] * 4) for start in (0, 4))
    assert first["completion"] != later["completion"]
    assert first.data["tokens"].value.tolist() != later.data["tokens"].value.tolist()


def test_no_prompts_give_no_rows(prompts):
    assert len(Generator(ModelSpec(None)).generate(prompts(0, 0), Sampling(samples=2, max_tokens=4), [])) == 0


def test_weights_contain_the_steps_and_a_folder_stores_them(tmp_path):
    trainer = Trainer(ModelSpec(None))
    trainer.count.fill_(3)
    trainer.save(tmp_path / "null")
    other = Trainer(ModelSpec(None))
    other.load(tmp_path / "null")
    assert dict(other.weights()) == {"steps": torch.tensor(3)}


@pytest.mark.parametrize("shares", [False, True])
def test_an_update_takes_the_configured_time(prompts, sampled, shares):
    @loss
    def likelihood(new):
        return -new.logprobs, {}

    trainer, began = Trainer(ModelSpec(None), Trainer.Settings(update_seconds=0.05)), time.monotonic()
    if shares:
        trainer.update_shares(sampled, likelihood, [], "tokens", {})
    else:
        trainer.update(
            Batch(sampled.axis, {**sampled.data, **Batch.of(prompt_tokens=[[1]] * len(sampled)).data}),
            likelihood,
        )
    assert time.monotonic() - began >= 0.05


def test_rows_have_the_recorded_lengths(prompts):
    sampling = Sampling(samples=2, max_tokens=9, lengths=(3, 1, 9))
    rows = Generator(ModelSpec(None)).generate(prompts(0, 4), sampling, [0] * 8)
    assert rows.data["tokens"].lengths.tolist() == [3, 1, 9, 3, 1, 9, 3, 1]
    assert set(rows["finish"]) == {"length"}
