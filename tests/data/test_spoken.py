"""Text of a model: with the special tokens inside a response, without its end tokens."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlflow.data.spoken import completions, special_tokens, texts


@pytest.fixture(scope="module")
def tokenizer():
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "7", "8", "<", "answer", ">"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")
    made.add_tokens(
        [
            AddedToken("<answer>", special=True),
            AddedToken("<end>", special=True),
            AddedToken("<think>", special=False),
        ]
    )
    return made


def test_special_tokens_are_the_ones_marked_by_the_tokenizer(tokenizer):
    assert special_tokens(tokenizer) == {0: "<pad>", 1: "<eos>", 7: "<answer>", 8: "<end>"}


@pytest.mark.parametrize(
    ("ids", "said", "bare"),
    [
        ([7, 2, 8, 1], "<answer>7<end>", "7"),  # ends in its own end token
        ([7, 2, 8], "<answer>7<end>", "7"),  # truncated
        ([2, 0, 0], "7", "7"),
        ([2, 0, 1], "7", "7"),
        ([2, 1, 0], "7", "7"),  # padding
        (
            [9, 2, 7, 3, 1],
            "<think>7<answer>8",
            "<think>78",
        ),  # an added token that is not special is always kept
        ([1], "", ""),
        ([], "", ""),
    ],
)
def test_text_excludes_only_the_end_and_the_padding_of_a_response(tokenizer, ids, said, bare):
    assert completions(tokenizer, [ids], [1]) == [said]
    assert completions(tokenizer, [ids], [1], bare=True) == [bare]


def test_an_end_unknown_to_the_model_is_text(tokenizer):
    assert completions(tokenizer, [[2, 8]], [1, 8]) == ["7"]
    assert completions(tokenizer, [[2, 8]], [1]) == texts(tokenizer, [[2, 8]]) == ["7<end>"]
