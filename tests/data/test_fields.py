"""Reading of records: messages with all their keys, and numbers too large for the dtype of a column."""

import json
from contextlib import nullcontext

import pytest

from rlflow import PlanError, row
from rlflow.data import open_data
from rlflow.data.fields import mapped
from rlflow.data.records import Raw
from rlflow.errors import Place

ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALL = {"role": "assistant", "content": "", "tool_calls": [ADD], "reasoning_content": "sum"}
RESULT = {"role": "tool", "content": "2", "name": "add", "tool_call_id": "a1"}
ASKED, SAID = {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}


def record(fields, filled=False):
    raw = Raw(fields, Place("data", 1), filled=filled)
    return mapped(raw, {}, {}).record(raw)


def test_messages_are_read_with_all_their_keys():
    assert record({"prompt": [ASKED, CALL, RESULT]}).prompt == (ASKED, CALL, RESULT)
    assert record({"prompt": [ASKED], "completion": [CALL, RESULT, SAID]}).responses == (
        (CALL, RESULT, SAID),
    )
    assert record({"prompt": "1+1?", "chosen": [CALL], "rejected": [SAID]}).responses == ((CALL,), "2")
    whole = record({"chosen": [ASKED, CALL], "rejected": [ASKED, SAID]})
    assert (whole.prompt, whole.responses) == ((ASKED,), ((CALL,), "2"))


def test_empty_keys_of_a_message_are_removed_except_content():
    alone = {"role": "assistant", "content": None, "tool_calls": []}
    assert record({"prompt": [ASKED | {"name": None, "tool_calls": None}, alone]}).prompt == (ASKED, alone)


@pytest.mark.parametrize("filled", [False, True])
def test_only_keys_filled_in_by_arrow_are_removed(filled):
    filling = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}, "id": None}
    (message,) = record({"prompt": [{**CALL, "tool_calls": [filling], "name": None}]}, filled).prompt
    assert message["tool_calls"] == [ADD if filled else filling]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", [ASKED | {"image": b"b"}]),
        ("completion", [CALL | {"image": b"b"}]),
        ("chosen", [SAID | {"image": b"b"}]),
    ],
)
def test_an_unsupported_key_of_a_message_is_named_with_its_line(field, value):
    fields = {"prompt": "1+1?", **({"rejected": "3"} if field == "chosen" else {}), field: value}
    with pytest.raises(
        PlanError,
        match=f"data:1: message 1 of the field '{field}' is invalid: its 'image' cannot be stored: bytes",
    ):
        record(fields)


@pytest.mark.parametrize(
    ("value", "family", "answer"),
    [
        (2**63 - 1, "int", False),
        (2**63, "int", True),
        (-(2**63), "int", False),
        (-(2**63) - 1, "int", True),
        (2**127 - 1, "float", False),
        (2**127, "float", True),
        (-(2**127), "float", True),
        (1e300, "float", False),
    ],
)
def test_an_integer_may_be_too_large_for_its_column(tmp_path, value, family, answer):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "p", "number": value}) + "\n")
    with pytest.raises(PlanError, match="the field 'number' is") if answer else nullcontext():
        open_data(
            tmp_path / "data.jsonl", columns={"number": row({"int": "int64", "float": "float32"}[family])}
        ).batch([0])
