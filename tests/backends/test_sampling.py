"""One draw: the distribution, its truncation, and the log-prob of the token."""

import math

import pytest
import torch
from transformers import AutoTokenizer

from rlflow.author.seeds import uniforms
from rlflow.backends.local import logprobs as of_logits
from rlflow.backends.local import sampling
from rlflow.backends.local.endings import Endings, text_stops
from rlflow.backends.local.sampling import draw, inverse, truncated
from rlflow.training.protocols import Sampling

LOGITS = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()


def frequencies(how, draws=20_000):
    token, logprob = draw(LOGITS.expand(draws, -1), uniforms(range(draws), 1)[:, 0], how)
    return torch.bincount(token, minlength=5) / draws, token, logprob


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature):
    expected = (LOGITS / temperature).softmax(-1)
    found, token, logprob = frequencies(Sampling(temperature=temperature))
    torch.testing.assert_close(found, expected, atol=0.012, rtol=0)
    torch.testing.assert_close(logprob, expected.log()[token])


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.74}, [0, 1]),
        ({"top_p": 0.76}, [0, 1, 2]),
        ({"top_p": 1e-9}, [0]),
        ({"top_k": 9}, range(5)),
        ({"top_k": 3, "top_p": 0.8}, [0, 1]),
    ],
)
def test_truncation_keeps_the_likeliest_and_renormalises_logprobs(options, kept):
    expected = torch.zeros(5)
    expected[list(kept)] = LOGITS.softmax(-1)[list(kept)]
    expected /= expected.sum()
    found, token, logprob = frequencies(Sampling(**options))
    torch.testing.assert_close(found, expected, atol=0.012, rtol=0)
    torch.testing.assert_close(logprob, expected.log()[token])


def test_greedy_takes_the_likeliest_at_temperature_one():
    token, logprob = draw(
        LOGITS.roll(2)[None], torch.tensor([0.99], dtype=torch.float64), Sampling(temperature=0, top_k=1)
    )
    assert token.tolist() == [2]
    assert logprob.item() == pytest.approx(torch.tensor(0.5).log().item())


def test_the_largest_uniform_number_draws_no_truncated_token():
    logits = truncated(torch.zeros(1, 1000), top_k=3, top_p=1.0)
    token, logprob = draw(logits, torch.tensor([1 - 2.0**-52], dtype=torch.float64), Sampling())
    assert logits[0, token] > -torch.inf
    assert torch.isfinite(logprob)


def test_the_smallest_uniform_number_draws_no_truncated_token():
    token, _ = draw(torch.tensor([[0.0, 3.0, 2.0]]), torch.zeros(1, dtype=torch.float64), Sampling(top_k=2))
    assert token.tolist() == [1]


def test_broken_logits_give_a_missing_logprob():
    token, logprob = draw(torch.full((1, 5), torch.nan), torch.tensor([0.5], dtype=torch.float64), Sampling())
    assert 0 <= int(token) < 5
    assert logprob.isnan()


@pytest.mark.parametrize("at_once", [1, 80, 1000])
def test_the_number_of_rows_per_sum_changes_nothing(monkeypatch, at_once):
    logits, uniform = (
        torch.randn(37, 40, generator=torch.Generator().manual_seed(0)),
        uniforms(range(37), 1)[:, 0],
    )
    plain, cut = draw(logits, uniform, Sampling()), draw(logits, uniform, Sampling(top_p=0.7))
    monkeypatch.setattr(of_logits, "CACHED", at_once)
    assert all(
        torch.equal(one, other) for one, other in zip(draw(logits, uniform, Sampling()), plain, strict=True)
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip(draw(logits, uniform, Sampling(top_p=0.7)), cut, strict=True)
    )


def test_a_large_vocabulary_is_drawn_from_like_a_small_one(monkeypatch):
    chance = torch.Generator().manual_seed(0)
    logprobs = (4 * torch.randn(64, 70_001, generator=chance)).log_softmax(-1)
    logprobs[:, torch.randint(70_001, (60_000,), generator=chance)] = -torch.inf
    logprobs[:, -800:] = -torch.inf
    uniform = torch.cat(
        [uniforms(range(61), 1)[:, 0], torch.tensor([0.0, 1 - 2**-53, 1 - 2**-52], dtype=torch.float64)]
    )
    tokens = inverse(logprobs, uniform)
    assert (logprobs.take_along_dim(tokens[:, None], 1) > -torch.inf).all()
    monkeypatch.setattr(sampling, "LARGE", 1 << 20)
    assert torch.equal(tokens[:62], inverse(logprobs, uniform)[:62])


def test_a_barred_token_gives_its_probability_to_the_others():
    logits = torch.tensor([[3.0, 1.0, 0.0]], dtype=torch.float64)
    barred, uniform = torch.tensor([0]), torch.zeros(1, dtype=torch.float64)
    token, logprob = draw(logits, uniform, Sampling(), barred)
    assert token.tolist() == [1]
    assert logprob.exp().item() == pytest.approx(1 / (1 + math.exp(-1)))
    token, logprob = draw(logits, uniform, Sampling(temperature=0), barred)
    assert (token.item(), logprob.item()) == (1, pytest.approx(logits.log_softmax(-1)[0, 1].item()))


def test_a_stop_string_ends_a_row_only_after_the_first_tokens(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["gpt2"])
    tokens = [token for letter in "ab\nc\n" for token in tokenizer(letter).input_ids]
    ends = [
        Endings(torch.tensor([0]), ("\n",), tokenizer, least)(torch.tensor([tokens]), len(tokens)).item()
        for least in (0, 2, 3, 4, 5)
    ]
    assert ends == [2, 2, 4, 4, 5]


@pytest.mark.parametrize(
    ("stop", "words", "ends"),
    [
        # by its id, not by its letters
        ("<bos>", ["a", "<bos>"], True),
        ("<bos>", ["a", *"<bos>"], False),
        ("<bos>", ["<bos>", "a"], False),
        # with text around it
        ("b<bos>", ["b", "<bos>"], True),
        ("b<bos>", ["a", "<bos>"], False),
        ("<bos>b", ["<bos>", "b"], True),
        ("<bos><unk>", ["<bos>", "<unk>"], True),
        ("<bos><unk>", ["<unk>", "<bos>"], False),
        ("<bos><unk>", ["<bos>", *"<unk>"], False),
        ("<bos>", ["<bos>", *"<bos>"], False),  # both; the newest token is one of the letters
    ],
)
@pytest.mark.parametrize("bare", [False, True])
def test_a_stop_string_matches_special_tokens_by_id(folders, stop, words, ends, bare):
    tokenizer = AutoTokenizer.from_pretrained(folders["gpt2"])
    assert text_stops((stop,), tokenizer, bare)(tokenizer.convert_tokens_to_ids(words), 1) is ends


def test_a_text_stop_string_is_searched_in_the_text_for_rewards(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders["gpt2"])
    ids = tokenizer.convert_tokens_to_ids(["a", "<bos>", "b"])
    assert [text_stops(("ab",), tokenizer, bare)(ids, 1) for bare in (False, True)] == [False, True]
