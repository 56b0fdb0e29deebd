"""Kinds of columns, and the table of standard columns."""

import pytest

import rlflow
from rlflow import group, row, scalar, text, token
from rlflow.author.columns import TABLE, Kind, Level, fits, standard_kind

CONTRACT = {
    "text": "prompt answer completion finish said failed episode",
    "prompt int64": "prompt_tokens",
    "token int64": "tokens policy_version turn",
    "token bool": "mask",
    "token float32": "sampled_logprobs logprobs ref_logprobs entropy values rewards advantages returns "
    "weights turn_rewards",
    "row float32": "scores temperature episode_score",
    "row int64": "group prefix_length prompt_id turns part",
    "scalar int64": "iteration",
    "scalar float32": "progress",
    "row bool": "chosen",
    "group bool": "keep",
}


def test_the_table_matches_the_contract():
    assert {name: str(entry.kind) for name, entry in TABLE.items()} == {
        name: kind for kind, names in CONTRACT.items() for name in names.split()
    }


def test_the_table_prints_a_line_for_each_column():
    lines = str(rlflow.columns()).splitlines()
    assert [line.split()[0] for line in lines] == list(rlflow.columns()) == list(TABLE)
    assert all(len(line.split()) > 3 for line in lines)
    assert rlflow.columns()["scores"].kind == row("float32")
    assert len(rlflow.columns()) == len(TABLE)


@pytest.mark.parametrize(
    ("given", "expected", "answer"),
    [
        (token("float32"), token("float32"), True),
        (token("float64"), token("float32"), True),  # dtypes of one family are converted
        (token("bfloat16"), token("float32"), True),
        (row("int32"), row("int64"), True),
        (row("bool"), row("float32"), False),  # dtypes of other families are not
        (row("int64"), row("float32"), False),
        (row("uint8"), row("int64"), False),
        (group("bool"), row("bool"), True),  # rows read group values repeated
        (row("bool"), group("bool"), False),
        (scalar("float32"), row("float32"), False),
        (token("float32"), Kind(Level.PROMPT, "float32"), False),
        (row, row("float32"), True),  # a dtype of None matches any
        (text, text, True),
        (None, token("float32"), True),  # unknown until the first real batch
        (token("float32"), None, True),
    ],
)
def test_compatible_kinds_may_be_read_as_each_other(given, expected, answer):
    assert fits(given, expected) is answer


def test_an_own_column_has_no_kind():
    assert standard_kind("difficulty") is None
