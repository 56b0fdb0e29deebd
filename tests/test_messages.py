import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.messages import MARK, Packed, as_text, is_messages, packed, read, unpacked, written

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
MESSAGES = st.lists(st.fixed_dictionaries({"role": TEXT, "content": TEXT}), min_size=1, max_size=4)


@given(MESSAGES)
def test_messages_come_out_as_they_went_in(messages):
    assert is_messages(messages)
    assert isinstance(packed(messages), str)
    assert unpacked(packed(messages)) == messages


@given(TEXT | MESSAGES.map(lambda messages: "".join(packed(messages))), st.integers(0, 2))
def test_text_stays_text_whatever_stands_in_it(text, marks):
    text = MARK * marks + text
    assert unpacked(text) == as_text(text) == text
    assert unpacked(read(written(text))) == text


@given(MESSAGES)
def test_messages_are_written_and_read(messages):
    text = written(packed(messages))
    assert type(text) is str
    assert unpacked(read(text)) == messages
    assert written(read(text)) == text


@pytest.mark.parametrize("rest", ["", "hello", "[]", "7", '[["a"]]', '["ab"]', "[[1, 2]]", '[["a","b"]]', '{"a": "b"}', "[" * 100_000])
def test_what_was_not_written_is_not_read(rest):
    with pytest.raises(ValueError, match="no messages"):
        read(MARK + rest)


def test_a_packed_value_stays_one_where_rows_are_pickled():
    value = packed([{"role": "user", "content": "why?"}])
    assert unpacked(pickle.loads(pickle.dumps(value))) == unpacked(value)
    assert isinstance(copy.deepcopy(value), Packed)


@pytest.mark.parametrize("value", [[], "text", ["text"], [{"role": "user"}], [{"role": "user", "content": None}], None,
                                   {"role": "user", "content": ""}, [{"role": "user", "content": "a", "tool_calls": "b"}],
                                   [{"role": 1, "content": "a"}]])  # fmt: skip
def test_what_is_no_list_of_messages_is_known(value):
    assert not is_messages(value)


def test_as_one_text_each_message_stands_under_its_role_and_one_alone_as_its_content():
    question, answer = {"role": "user", "content": "why?"}, {"role": "assistant", "content": "so"}
    assert as_text([question]) == "why?"
    assert as_text([question, answer]) == "user: why?\n\nassistant: so"
