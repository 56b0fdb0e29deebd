"""Rows of vLLM's engine while they grow, and as columns when they are complete. The tests do not need vLLM."""

import pytest

from rlflow.author.batch import Axis
from rlflow.backends.local.tokenizer import load_tokenizer
from rlflow.backends.vllm.generator import batch_of, token_column
from rlflow.backends.vllm.vllm_engine import Row, ended_in_order
from rlflow.training.protocols import Sampling

EOS = 1


@pytest.fixture(scope="module")
def words(folders):
    return load_tokenizer(folders["gpt2"])


def test_a_row_grows_up_to_its_stop_token():
    row = Row()
    assert not row.grow([4, 5], [-0.5, -0.25], 3, lambda tokens: False)
    assert row.grow([6, 7, 8], [-1.0, -2.0, -3.0], 4, lambda tokens: tokens[-1] == 7)
    assert (row.tokens, row.logprobs, row.versions) == ([4, 5, 6, 7], [-0.5, -0.25, -1.0, -2.0], [3, 3, 4, 4])


def test_rows_are_given_when_no_other_can_end_before_them():
    rows = [Row(tokens=[0] * length, ended=True) for length in (3, 2, 2, 4, 1)]
    rows[1].ended = False
    assert ended_in_order(rows, 4) == [2]  # the second may still end with three tokens, like the first
    rows[1].tokens, rows[1].ended = [0] * 3, True
    assert ended_in_order(rows, 4) == [2, 0, 1, 3, 4]
    assert ended_in_order(rows, 2) == [0, 1, 2, 3, 4]
    rows[1].stopped = True
    assert ended_in_order(rows, 4) == [2, 1, 0, 3, 4]


def test_tokens_without_a_log_prob_are_refused():
    with pytest.raises(ValueError, match="zip"):
        Row().grow([4, 5], [-0.5], 0, lambda tokens: False)


def test_rows_become_columns_with_the_end_token_and_without_its_text(words):
    first, second = words("12").input_ids, words("a").input_ids
    rows = [
        Row([*first, EOS], [-0.1, -0.2, -0.3], [1, 1, 2], ended=True, stopped=True),
        Row(second, [-0.4], [2], ended=True),
        Row(),
    ]
    batch = batch_of(Axis.fresh(3), rows, Sampling(1, 4, temperature=0.5), [EOS], words)
    assert batch.data["tokens"].lists() == [[*first, EOS], second, []]
    assert batch.data["policy_version"].lists() == [[1, 1, 2], [2], []]
    assert batch.data["mask"].lists() == [[True] * 3, [True], []]
    assert [round(value, 3) for value in batch.data["sampled_logprobs"].value.tolist()] == [
        -0.1,
        -0.2,
        -0.3,
        -0.4,
    ]
    assert list(batch["completion"]) == ["12", "a", ""]
    assert list(batch["finish"]) == ["stop", "length", "length"]
    assert batch["temperature"].tolist() == [0.5] * 3


def test_greedy_rows_have_a_temperature_of_one(words):
    batch = batch_of(Axis.fresh(1), [Row([4], [-0.1], [0])], Sampling(1, 4, temperature=0.0), [EOS], words)
    assert batch["temperature"].tolist() == [1.0]


def test_no_rows_give_no_pieces(words):
    assert token_column([]).value.tolist() == []
    assert batch_of(Axis.fresh(0), [], Sampling(1, 4), [EOS], words).data["tokens"].lists() == []
