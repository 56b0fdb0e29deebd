"""Sampling: what a row draws is a function of its prompt, its seed and the weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow.backends.local import Generator, Trainer, decode
from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.batch import Batch
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec, Sampling

SHAPES = ["gpt2", "qwen3", "llama", "gemma3", "gemma2"]
TEXTS = ["2+2=", "a", "the quick brown fox", "x = y"]


@pytest.fixture(scope="module")
def generators(folders):
    return {shape: Generator(ModelSpec(folders[shape])) for shape in SHAPES}


@pytest.fixture(scope="module")
def prompts(folders):
    encode = load_tokenizer(folders["gpt2"])
    return Batch.of(prompt=TEXTS, prompt_tokens=[encode(text).input_ids for text in TEXTS])


def tokens(batch, row):
    return torch.split(batch.data["tokens"].value, batch.data["tokens"].lengths.tolist())[row].tolist()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_sampled_logprobs_are_those_of_the_trainer(folders, generators, prompts, shape, temperature):
    out = generators[shape].generate(prompts, Sampling(samples=3, max_tokens=16, temperature=temperature), range(12))
    assert out["temperature"].tolist() == pytest.approx([temperature or 1.0] * 12)
    got = Trainer(ModelSpec(folders[shape])).forward(out | prompts)
    torch.testing.assert_close(got["logprobs"], out["sampled_logprobs"], atol=1e-5, rtol=0)


def test_bfloat16_samples_agree_with_a_bfloat16_forward(folders, prompts):
    out = Generator(ModelSpec(folders["qwen3"], dtype="bfloat16")).generate(prompts, Sampling(samples=3, max_tokens=16), range(12))
    assert out.data["sampled_logprobs"].value.dtype is torch.float32
    for trained in (False, True):
        got = Trainer(ModelSpec(folders["qwen3"], dtype="bfloat16", trained=trained)).forward(out | prompts)
        torch.testing.assert_close(got["logprobs"], out["sampled_logprobs"], atol=0.1, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_alone_draws_what_it_draws_among_others(generators, prompts, shape):
    sampling = Sampling(samples=2, max_tokens=24)
    seeds = [11, 12, 13, 14, 15, 16, 17, 18]
    together = generators[shape].generate(prompts, sampling, seeds)
    for i in range(4):
        alone = generators[shape].generate(prompts.rows([i]), Sampling(samples=1, max_tokens=24), seeds[2 * i : 2 * i + 1])
        assert tokens(alone, 0) == tokens(together, 2 * i)


def test_long_responses_outgrow_the_first_cache(folders, generators, prompts):
    out = generators["llama"].generate(prompts, Sampling(samples=2, max_tokens=200), range(8))
    assert max(out.data["tokens"].lengths.tolist()) == 200
    got = Trainer(ModelSpec(folders["llama"])).forward(out | prompts)
    torch.testing.assert_close(got["logprobs"], out["sampled_logprobs"], atol=1e-5, rtol=0)


def test_a_row_does_not_depend_on_the_size_of_batches(folders, generators, prompts):
    sampling, seeds = Sampling(samples=4, max_tokens=12), range(100, 116)
    small = Generator(ModelSpec(folders["llama"]), Generator.Settings(batch_tokens=50)).generate(prompts, sampling, seeds)
    assert [tokens(small, i) for i in range(16)] == [tokens(generators["llama"].generate(prompts, sampling, seeds), i) for i in range(16)]


def test_columns_are_over_the_repeated_axis(generators, prompts):
    out = generators["gpt2"].generate(prompts, Sampling(samples=2, max_tokens=5), range(8))
    assert set(out.columns) == {"tokens", "mask", "completion", "finish", "sampled_logprobs", "temperature", "policy_version", "group"}
    assert out["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert (out | prompts)["prompt"] == [text for text in TEXTS for _ in range(2)]
    assert bool(out.data["mask"].value.all())
    assert not any(column.value.is_inference() for column in out.data.values() if isinstance(column.value, torch.Tensor))
    with pytest.raises(ValueError, match="found 3 seeds, expected one per row: 8"):
        generators["gpt2"].generate(prompts, Sampling(samples=2), range(3))


def test_no_prompts_give_no_rows(generators, prompts):
    assert len(generators["gpt2"].generate(prompts.rows([]), Sampling(samples=2), [])) == 0


@pytest.mark.parametrize("shape", ["gpt2", "gemma3"])
def test_greedy_is_the_likeliest_token_of_a_plain_forward(folders, generators, prompts, shape):
    out = generators[shape].generate(prompts, Sampling(max_tokens=12, temperature=0.0), [0] * 4)
    model = AutoModelForCausalLM.from_pretrained(folders[shape], dtype=torch.float32).eval()
    for i, prompt in enumerate(torch.split(prompts.data["prompt_tokens"].value, prompts.data["prompt_tokens"].lengths.tolist())):
        ids = prompt.tolist()
        for token in tokens(out, i):
            assert token == int(model(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)


def test_eos_ends_a_row_and_belongs_to_it(generators, prompts):
    """EOS is also the padding token of these models."""
    out = generators["gpt2"].generate(prompts, Sampling(samples=32, max_tokens=40), range(128))
    lengths = out.data["tokens"].lengths.tolist()
    assert {"stop", "length"} == set(out["finish"])
    for i, finish in enumerate(out["finish"]):
        row = tokens(out, i)
        assert (row[-1] == 1) if finish == "stop" else (len(row) == 40)
        assert 1 not in row[:-1]
        assert "<eos>" not in out["completion"][i]
    assert max(lengths) == 40


def test_every_eos_of_the_generation_config_counts(folders, prompts, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folders["llama"])
    model.generation_config.eos_token_id = [1, 20, 21]
    model.save_pretrained(tmp_path)
    load_tokenizer(folders["llama"]).save_pretrained(tmp_path)
    generator = Generator(ModelSpec(tmp_path))
    assert generator.eos == [1, 20, 21]
    out = generator.generate(prompts, Sampling(samples=16, max_tokens=60), range(64))
    last = {tokens(out, i)[-1] for i, finish in enumerate(out["finish"]) if finish == "stop"}
    assert {20, 21} & last
    assert last <= {1, 20, 21}
    for i, finish in enumerate(out["finish"]):
        assert len(out["completion"][i]) <= len(tokens(out, i)) - (finish == "stop")  # one character per token, none for EOS


def test_a_stop_string_ends_a_row_and_stays_in_it(generators, prompts):
    free = generators["llama"].generate(prompts, Sampling(samples=4, max_tokens=40), range(16))
    stop = free["completion"][3][10:12]
    out = generators["llama"].generate(prompts, Sampling(samples=4, max_tokens=40, stop=(stop,)), range(16))
    for i in range(16):
        text = free["completion"][i]
        if stop in text:
            assert out["completion"][i] == text[: text.index(stop) + len(stop)]
            assert out["finish"][i] == "stop"
        else:
            assert tokens(out, i) == tokens(free, i)


def test_rows_that_ended_leave_the_batch(generators, prompts, monkeypatch):
    sizes = []
    advance = decode.advance
    monkeypatch.setattr(decode, "advance", lambda n, rows, token, step: sizes.append(len(token)) or advance(n, rows, token, step))
    out = generators["gpt2"].generate(prompts, Sampling(samples=32, max_tokens=120), range(128))
    lengths = out.data["tokens"].lengths
    for step, size in enumerate(sizes):
        going = int((lengths > step + 1).sum())
        assert going <= size < max(going / (1 - decode.IDLE), 1) + 1
    assert sizes[-1] < 64


def test_a_prompt_is_read_once_for_all_its_samples(generators, prompts, monkeypatch):
    read = []
    prefill = decode.prefill
    monkeypatch.setattr(decode, "prefill", lambda n, pieces, room: read.append(len(pieces)) or prefill(n, pieces, room))
    generators["gpt2"].generate(prompts, Sampling(samples=8, max_tokens=2), range(32))
    assert read == [4]


def test_received_weights_are_what_is_sampled_from(folders, prompts):
    source = Trainer(ModelSpec(folders["qwen3"], trained=True))
    generator = Generator(ModelSpec(folders["qwen3"]))
    with torch.no_grad():
        for parameter in source.network.module.parameters():
            parameter.mul_(1.1)
    generator.receive(source.weights(), version=7)
    out = generator.generate(prompts, Sampling(max_tokens=8), range(4))
    assert set(out.data["policy_version"].value.tolist()) == {7}
    torch.testing.assert_close(source.forward(out | prompts)["logprobs"], out["sampled_logprobs"], atol=1e-5, rtol=0)


def test_unknown_missing_and_misshapen_weights_are_refused(folders):
    generator = Generator(ModelSpec(folders["qwen3"]))
    weights = dict(generator.network.tensors())
    assert "lm_head.weight" not in weights  # tied to the embedding, sent once
    with pytest.raises(ValueError, match="found 'nonsense'"):
        generator.receive(iter([("nonsense", torch.zeros(1))]), 1)
    with pytest.raises(ValueError, match="found no model.norm.weight, expected every weight"):
        generator.receive(((name, t) for name, t in weights.items() if name != "model.norm.weight"), 1)
    with pytest.raises(ValueError, match="expected the shape"):
        generator.receive(iter([("model.norm.weight", torch.zeros(3))]), 1)
    assert generator.version == 0


def test_a_generator_without_a_tokenizer_is_a_plan_error(folders, tmp_path):
    AutoModelForCausalLM.from_pretrained(folders["gpt2"]).save_pretrained(tmp_path)
    with pytest.raises(PlanError, match="has no tokenizer"):
        Generator(ModelSpec(tmp_path))


def test_sleeping_and_waking_change_nothing(generators, prompts):
    sampling = Sampling(max_tokens=6)
    before = generators["gpt2"].generate(prompts, sampling, range(4))
    generators["gpt2"].sleep()
    generators["gpt2"].wake()
    assert torch.equal(generators["gpt2"].generate(prompts, sampling, range(4))["tokens"], before["tokens"])


@pytest.mark.parametrize(("batch_tokens", "chunks", "dtype"), [(65536, 4, "float64"), (500, 3, "bfloat16"), (65536, 80, "float32")])
def test_chunks_are_the_rows_of_one_call_in_the_order_in_which_they_end(folders, prompts, batch_tokens, chunks, dtype):
    generator = Generator(ModelSpec(folders["gpt2"], dtype=dtype), Generator.Settings(batch_tokens=batch_tokens))
    sampling, seeds = Sampling(samples=8, max_tokens=30), range(32)
    whole, parts = generator.generate(prompts, sampling, seeds), list(generator.generate_chunks(prompts, sampling, seeds, chunks))
    assert len(parts) == chunks
    taken = torch.cat([part.axis.index for part in parts])
    assert sorted(taken.tolist()) == list(range(32))
    assert {part.axis.parent for part in parts} == {parts[0].axis.parent}
    joined = Batch.concat([part for part in parts if len(part)]).rows(taken.argsort())
    for name, data in whole.data.items():
        again = joined.data[name]
        assert again.kind == data.kind
        assert again.value == data.value if isinstance(data.value, tuple) else torch.equal(again.value, data.value), name
    if batch_tokens == 65536:
        lengths = whole.data["tokens"].lengths
        order = sorted(range(32), key=lambda row: (int(lengths[row]), whole["finish"][row] == "length", row))
        assert [row for part in parts for row in sorted(part.axis.index.tolist(), key=order.index)] == order


def test_no_prompts_give_chunks_without_rows(generators, prompts):
    assert [len(chunk) for chunk in generators["gpt2"].generate_chunks(prompts.rows([]), Sampling(samples=2), [], 3)] == [0, 0, 0]
