"""Sampling: the draws of a row depend on its prompt, its seed and the weights."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlflow.author.batch import Batch
from rlflow.backends.local import Generator, Trainer, decode
from rlflow.backends.local.attention import without_cudnn
from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec, Sampling

SHAPES = ["gpt2", "qwen3", "llama", "gemma2"]
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


@pytest.mark.parametrize("shape", ["gemma2"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_sampled_logprobs_match_the_trainer(folders, generators, prompts, shape, temperature):
    out = generators[shape].generate(
        prompts, Sampling(samples=3, max_tokens=16, temperature=temperature), range(12)
    )
    assert out["temperature"].tolist() == pytest.approx([temperature or 1.0] * 12)
    got = Trainer(ModelSpec(folders[shape])).forward(out | prompts)
    torch.testing.assert_close(got["logprobs"], out["sampled_logprobs"], atol=1e-5, rtol=0)


def test_bfloat16_samples_agree_with_a_bfloat16_forward(folders, prompts):
    out = Generator(ModelSpec(folders["qwen3"], dtype="bfloat16")).generate(
        prompts, Sampling(samples=3, max_tokens=16), range(12)
    )
    assert out.data["sampled_logprobs"].value.dtype is torch.float32
    for trained in (False, True):
        got = Trainer(ModelSpec(folders["qwen3"], dtype="bfloat16", trained=trained)).forward(out | prompts)
        torch.testing.assert_close(got["logprobs"], out["sampled_logprobs"], atol=0.1, rtol=0)


def test_long_responses_outgrow_the_first_cache(folders, generators, prompts):
    out = generators["llama"].generate(prompts, Sampling(samples=2, max_tokens=200), range(8))
    assert max(out.data["tokens"].lengths.tolist()) == 200
    got = Trainer(ModelSpec(folders["llama"])).forward(out | prompts)
    torch.testing.assert_close(got["logprobs"], out["sampled_logprobs"], atol=1e-5, rtol=0)


def test_a_row_does_not_depend_on_the_size_of_batches(folders, generators, prompts):
    sampling, seeds = Sampling(samples=4, max_tokens=12), range(100, 116)
    small = Generator(ModelSpec(folders["llama"]), Generator.Settings(batch_tokens=50)).generate(
        prompts, sampling, seeds
    )
    assert [tokens(small, i) for i in range(16)] == [
        tokens(generators["llama"].generate(prompts, sampling, seeds), i) for i in range(16)
    ]


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


def test_ended_rows_leave_the_batch(generators, prompts, monkeypatch):
    sizes = []
    advance = decode.advance
    monkeypatch.setattr(
        decode,
        "advance",
        lambda n, rows, token, step: sizes.append(len(token)) or advance(n, rows, token, step),
    )
    out = generators["gpt2"].generate(prompts, Sampling(samples=32, max_tokens=120), range(128))
    lengths = out.data["tokens"].lengths
    for step, size in enumerate(sizes):
        going = int((lengths > step + 1).sum())
        assert going <= size < max(going / (1 - decode.IDLE), 1) + 1
    assert sizes[-1] < 64


def test_a_prompt_is_read_once_for_all_its_samples(generators, prompts, monkeypatch):
    read = []
    prefill = decode.prefill
    monkeypatch.setattr(
        decode, "prefill", lambda n, pieces, room: read.append(len(pieces)) or prefill(n, pieces, room)
    )
    generators["gpt2"].generate(prompts, Sampling(samples=8, max_tokens=2), range(32))
    assert read == [4]


def test_unknown_missing_and_misshapen_weights_are_refused(folders):
    generator = Generator(ModelSpec(folders["qwen3"]))
    weights = dict(generator.network.tensors())
    assert "lm_head.weight" not in weights  # tied to the embedding, so sent once
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


@pytest.mark.parametrize(
    ("batch_tokens", "chunks", "dtype"), [(65536, 4, "float64"), (500, 3, "bfloat16"), (65536, 80, "float32")]
)
def test_chunks_contain_the_rows_of_one_call_in_order_of_their_ends(
    folders, prompts, batch_tokens, chunks, dtype
):
    generator = Generator(
        ModelSpec(folders["gpt2"], dtype=dtype), Generator.Settings(batch_tokens=batch_tokens)
    )
    sampling, seeds = Sampling(samples=8, max_tokens=30), range(32)
    whole, parts = (
        generator.generate(prompts, sampling, seeds),
        list(generator.generate_chunks(prompts, sampling, seeds, chunks)),
    )
    assert len(parts) == chunks
    taken = torch.cat([part.axis.index for part in parts])
    assert sorted(taken.tolist()) == list(range(32))
    assert {part.axis.parent for part in parts} == {parts[0].axis.parent}
    joined = Batch.concat([part for part in parts if len(part)]).rows(taken.argsort())
    for name, data in whole.data.items():
        again = joined.data[name]
        assert again.kind == data.kind
        assert (
            again.value == data.value
            if isinstance(data.value, tuple)
            else torch.equal(again.value, data.value)
        ), name
    if batch_tokens == 65536:
        lengths = whole.data["tokens"].lengths
        order = sorted(range(32), key=lambda row: (int(lengths[row]), whole["finish"][row] == "length", row))
        assert [row for part in parts for row in sorted(part.axis.index.tolist(), key=order.index)] == order


@pytest.mark.parametrize(("device", "inside"), [("cuda", False), ("cpu", True)])
def test_gpu_steps_avoid_the_nondeterministic_cudnn_attention(device, inside):
    assert torch.backends.cuda.cudnn_sdp_enabled()
    with without_cudnn(torch.device(device)):
        assert torch.backends.cuda.cudnn_sdp_enabled() is inside
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_model_without_an_end_token_samples_recorded_lengths(folders, prompts):
    one = Generator(ModelSpec(folders["gpt2"]))
    one.eos = []
    rows = one.generate(prompts, Sampling(max_tokens=4, lengths=(2, 4, 1, 3)), range(len(TEXTS)))
    assert rows.data["tokens"].lengths.tolist() == [2, 4, 1, 3]
