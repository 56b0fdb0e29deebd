import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.author.messages import (
    MARK,
    Packed,
    as_text,
    cut_to,
    fault,
    is_messages,
    packed,
    read,
    unpacked,
    written,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.none() | st.booleans() | st.integers() | TEXT
JSON = st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner), max_leaves=4)
MORE = st.fixed_dictionaries(
    {"role": TEXT, "content": TEXT, "tool_calls": JSON}, optional={"name": TEXT, "reasoning_content": TEXT}
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}) | MORE, min_size=1, max_size=4)


@given(MESSAGES)
def test_messages_unpack_to_themselves(messages):
    assert is_messages(messages)
    assert isinstance(packed(messages), str)
    assert unpacked(packed(messages)) == messages


@given(TEXT | MESSAGES.map(lambda messages: "".join(packed(messages))), st.integers(0, 2))
def test_any_text_stays_text(text, marks):
    text = MARK * marks + text
    assert unpacked(text) == as_text(text) == text
    assert unpacked(read(written(text))) == text


@given(MESSAGES)
def test_messages_are_written_and_read(messages):
    text = written(packed(messages))
    assert type(text) is str
    assert unpacked(read(text)) == messages
    assert written(read(text)) == text


@pytest.mark.parametrize(
    "rest",
    ["", "hello", "[]", "7", '[["a"]]', '["ab"]', "[[1, 2]]", '[["a","b"]]', '{"a": "b"}', "[" * 100_000],
)
def test_foreign_text_is_not_read_as_messages(rest):
    with pytest.raises(ValueError, match="no messages"):
        read(MARK + rest)


def test_a_packed_value_stays_packed_after_pickling():
    value = packed([{"role": "user", "content": "why?"}])
    assert unpacked(pickle.loads(pickle.dumps(value))) == unpacked(value)
    assert isinstance(copy.deepcopy(value), Packed)


@pytest.mark.parametrize(
    "value",
    [
        [],
        "text",
        ["text"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        None,
        {"role": "user", "content": ""},
        [{"role": 1, "content": "a"}],
        [{"role": "user", "content": "a", "image": b"b"}],
    ],
)
def test_invalid_messages_are_detected(value):
    assert not is_messages(value)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"content": ["a"], "name": "b"}, "its 'content' is list, expected a text"),
        ({"content": None}, "its 'content' is NoneType, expected a text"),
        ({"content": "a", "image": b"b"}, "its 'image' cannot be stored: bytes has no JSON form"),
        ({"content": "a", "at": [{"day": {1, 2}}]}, "its 'at' cannot be stored: list"),
        ({"content": "a", 7: "b"}, "its '7' cannot be stored: the key is not a text"),
        ({"content": "a", "name": "\ud800"}, "its 'name' cannot be stored: it is not valid Unicode"),
    ],
)
def test_an_unsupported_key_is_named(more, says):
    assert fault({"role": "user", **more}).startswith(says)


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": "a"}])
def test_a_message_that_only_calls_a_tool_needs_no_content(content):
    message = {
        "role": "assistant",
        **content,
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": None}}}],
    }
    assert is_messages([message])
    assert unpacked(packed([message])) == [message]
    calls = '{"tool_calls": [{"function": {"name": "add", "arguments": {"a": null}}}]}'
    assert as_text([message]) == (f"a {calls}" if content.get("content") else calls)


def test_messages_as_text_have_role_headers_unless_there_is_one():
    question, answer = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
    assert as_text([question]) == "why?"
    assert as_text([question, answer]) == "user: why?\n\nassistant: so"


def test_a_long_text_and_the_last_message_are_cut_and_others_stay():
    first, last = {"role": "user", "content": "abcdef"}, {"role": "tool", "content": "abcdef", "name": "x"}
    assert cut_to("abcdef", 4) == "abcd"
    assert cut_to([first, last], 4) == [first, {**last, "content": "abcd"}]
    for value in (
        "abcd",
        [first, {"role": "tool", "content": "abcd"}],
        [first, {"role": "tool"}],
        [],
        5,
        None,
    ):
        assert cut_to(value, 4) is value
