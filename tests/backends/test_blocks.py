"""Decoding checks a GPU once per block of tokens. The same blocks on a CPU give the same rows as a check at
every token.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waits import DEVICE, counted

from rlflow.author.batch import Batch
from rlflow.backends.local import Generator, decode
from rlflow.training.protocols import ModelSpec, Sampling

pytestmark = pytest.mark.slow  # runs models or processes: each test is short, but all together are not

UNEVEN = Batch.of(prompt_tokens=[[5, 6, 7, 8], [9], list(range(5, 24)), [30, 31]])
EVEN = Batch.of(prompt_tokens=[[5, 6, 7, 8], [9, 10, 11, 12], [3, 4, 5, 6], [30, 31, 32, 33]])
SEEDS = range(32)


@pytest.fixture(scope="module")
def generator(folders):
    return Generator(ModelSpec(folders["gpt2"], dtype="float64"))


@pytest.fixture(scope="module")
def bfloat16(folders):
    return Generator(ModelSpec(folders["qwen3"], dtype="bfloat16"))


def sampled(generator, prompts, sampling, block, idle=decode.IDLE):
    """Sample all rows at once, and in chunks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rlflow.backends.local.generator.block_of", lambda device: block)
        patch.setattr(decode, "IDLE", idle)
        chunks = generator.generate_chunks(prompts, sampling, SEEDS, 7)
        return generator.generate(prompts, sampling, SEEDS), [chunk.axis.index.tolist() for chunk in chunks]


def same(one, other, but=()):
    for name, data in one.data.items():
        again = other.data[name]
        assert data.lengths is None or torch.equal(data.lengths, again.lengths)
        if name not in but:
            assert (
                again.value == data.value
                if isinstance(data.value, tuple)
                else torch.equal(again.value, data.value)
            ), name


@settings(max_examples=12, derandomize=True)
@given(
    block=st.integers(2, 40),
    tokens=st.integers(1, 50),
    stop=st.lists(st.text("ab 1=", min_size=1, max_size=3), max_size=3),
    eos=st.sets(st.integers(0, 20), max_size=6),
    uneven=st.booleans(),
    least=st.sampled_from([0, 0, 1, 7, 30]),
)
def test_rows_end_as_with_a_check_at_every_token(
    generator, monkeypatch, block, tokens, stop, eos, uneven, least
):
    monkeypatch.setattr(generator, "eos", sorted(eos))
    prompts, sampling = UNEVEN if uneven else EVEN, Sampling(8, tokens, stop=tuple(stop), min_tokens=least)
    (rows, chunks), (blocks, same_chunks) = (
        sampled(generator, prompts, sampling, each) for each in (1, block)
    )
    same(rows, blocks, but=("sampled_logprobs",))
    torch.testing.assert_close(
        rows.data["sampled_logprobs"].value, blocks.data["sampled_logprobs"].value, atol=1e-12, rtol=0
    )
    assert chunks == same_chunks
    for row, length, finish in zip(
        rows["tokens"].tolist(), rows.data["tokens"].lengths.tolist(), rows["finish"], strict=True
    ):
        assert not eos & set(row[: min(least, length)])
        assert finish == "length" or length > least


@pytest.mark.parametrize("prompts", [UNEVEN, EVEN])
def test_log_probs_have_the_same_bits_if_no_row_leaves(bfloat16, prompts):
    (rows, _), (blocks, _) = (sampled(bfloat16, prompts, Sampling(8, 40), each, idle=1.0) for each in (1, 16))
    assert set(rows["finish"]) == {"stop", "length"}
    same(rows, blocks)


def test_blocks_are_used_on_asynchronous_devices():
    assert (decode.block_of(torch.device("cpu")), decode.block_of(torch.device("cuda", 1))) == (1, 16)


@pytest.mark.parametrize(
    ("shape", "prompts"),
    [
        ("qwen3", UNEVEN),
        ("gpt2", EVEN),
        ("gemma3", UNEVEN),
        pytest.param("llama", UNEVEN, marks=pytest.mark.slow),
        pytest.param("gpt2", UNEVEN, marks=pytest.mark.slow),
    ],
)
def test_the_host_waits_once_in_sixteen_tokens(folders, shape, prompts):
    """The host also waits for the inputs of the draws, and at the end for tokens and log-probs. Rows leave
    early.
    """
    generator = Generator(ModelSpec(folders[shape]))
    generator.network.to(DEVICE)
    draws = torch.Generator().manual_seed(0)
    with counted(lambda there: torch.randint(0, 40, there.shape, generator=draws).to(there.dtype)) as waits:
        rows = generator.generate(prompts, Sampling(8, 36), SEEDS)
    assert set(rows["finish"]) == {"stop", "length"}
    assert waits == ["to meta"] + ["to cpu"] * (3 + 2)
